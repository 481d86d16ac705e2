// The part of preact that the page uses, typed for `tsc --checkJs`.
export type Child = VNode | string | number | boolean | null | undefined | Child[];
export interface VNode { type: unknown; props: unknown; }
export function h(type: unknown, props: unknown, ...children: unknown[]): VNode;
export function render(node: Child, parent: Element): void;
