// What the server sends (proxy/view/summaries.py, bounded.py, turn_tokens.py, fork.py).
export interface Session {
  id: string; kind: string; status: string; created_at: number; completed_at: number | null;
  profile: string; metadata: Record<string, unknown>;
  origin: { session: string; turn: number } | null;
  reward: number | null;
  rewards: { key: string; value: number; parts: Record<string, number>; turn: number | null }[];
  turns: number; running: number; cut: number; sampled_tokens: number; longest_path: number;
  last_at: number | null; forks: Record<string, number>;
}
export interface Head {
  session: string; index: number; parent: number | null; after: number | null;
  same_as: number | null; fork: string | null; status: string; finish: string | null;
  dialect: string; agent: string | null; shared: number; new: number; sampled: number;
  versions: [number, number, number][]; started_at: number;
  first_token_s: number | null; duration_s: number | null;
}
export type Cut = string | { text: string; chars: number };
export interface Message {
  role: string; text: Cut; reasoning: Cut | null; tool_call_id: string | null; more_calls: number;
  tool_calls: { id: string; name: string; arguments: Cut }[];
}
export interface Turn {
  index: number; recorded: boolean; messages: Message[]; more_messages: number; tools: string[];
  answer: Message | null; sampling: Record<string, unknown>;
}
export interface Shown { ids: number[]; texts: string[] | null; }
export interface Fork {
  index: number; cause: string; against: number | null; common?: number;
  sent_messages?: number; recorded_messages?: number;
  recorded?: Message | null; sent?: Message | null;
  changes?: { field: string; parts: [string, string][] }[];
  tokens: { parent: number; shared: number; before: Shown; recorded: Shown; sent: Shown } | null;
}
export interface TokenPage {
  start: number; total: number; prompt_tokens: number; shared_tokens: number; ids: number[];
  texts: string[] | null; logprobs: (number | null)[];
  spans: [number, number, number, boolean, boolean, number | null][];
}
export interface Engine {
  name: string; url: string; healthy: boolean; in_flight: number; version: number;
  model: string | null; max_context_tokens: number | null; text_only: boolean;
}
export interface State { engines: Engine[]; paused: boolean; }
export interface StoredEvent {
  session_id: string; seq: number; at: number; kind: string; [more: string]: unknown;
}
export interface News { begun: Head[]; answered: Head[]; events: StoredEvent[]; }
