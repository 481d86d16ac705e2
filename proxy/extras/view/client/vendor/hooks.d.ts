type Inputs = readonly unknown[];
export function useState<S>(initial: S | (() => S)): [S, (next: S | ((before: S) => S)) => void];
export function useEffect(effect: () => void | (() => void), inputs?: Inputs): void;
export function useLayoutEffect(effect: () => void | (() => void), inputs?: Inputs): void;
export function useMemo<T>(make: () => T, inputs: Inputs): T;
export function useCallback<T>(made: T, inputs: Inputs): T;
export function useRef<T>(initial: T): { current: T };
