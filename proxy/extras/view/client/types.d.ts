// What the server sends (proxy/extras/view/summaries.py, bounded.py, turn_tokens.py, fork.py).
export interface Session {
  id: string; kind: string; status: string; created_at: number; completed_at: number | null;
  profile: string; metadata: Record<string, unknown>;
  origin: { session: string; turn: number } | null;
  reward: number | null;
  rewards: { key: string; value: number; parts: Record<string, number>; turn: number | null }[];
  turns: number; running: number; cut: number; sampled_tokens: number; longest_path: number;
  last_at: number | null; forks: Record<string, number>; marks: Mark[];
  asked: string; rating: { value: number | null; comment: string } | null;
  refused: { status: number; message: string } | null;
}
/** A search rule that a turn of a session matches. */
export interface Mark { rule: string; action: string; turn: number; at: number; found: string; }
export interface Rule {
  name: string; query: Record<string, string | boolean>; action: string; configured: boolean;
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
/** `images`: index, number of tokens and sha256 of each. */
export interface Shown { ids: number[]; texts: string[] | null; images: [number, number, string][]; }
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
  alternatives?: { ids: number[][]; logprobs: number[][]; texts: Record<string, string> | null };
  /** Where each begins and ends, and its sha256. */
  images?: [number, number, string][];
  trained?: TrainedTokens;
}
/** The trainer's side of the same tokens; null where it did not use the token. */
export interface TrainedTokens {
  step: number; advantages?: (number | null)[]; logprobs?: (number | null)[];
  entropies?: (number | null)[]; trained?: (boolean | null)[];
}
export interface Engine {
  name: string; url: string; healthy: boolean; in_flight: number; version: number;
  model: string | null; max_context_tokens: number | null; text_only: boolean;
  /** What vLLM reports: calls in its queue, the used share of its cache, and the share of hits. */
  details: { queued?: number; cache_used?: number; cache_hits?: number };
}
/** What changes when a file of a run does: its inode and its size. */
export interface RunStamps {
  name: string; folder: string; running: boolean; metrics: number[]; trials: number[]; summary: number[]; now: RunNow | null;
}
/** What a run does: its phase, the trials that ended in it, and the groups of the next batch. */
export interface RunNow {
  step: number; phase: string; started_at: number; trials: number; ended: number; failed: number;
  groups: { ready: number; needed: number; running: number; max_staleness: number } | null;
  errors: { trial_id: string; error: string }[];
}
export interface State {
  engines: Engine[]; policies: { name: string; version: number }[]; paused: boolean; waiting: number; rule_faults: RuleFault[]; learners?: Learner[]; runs?: RunStamps[]; may_edit?: boolean;
}
/** A policy that is learned from sessions; `journal` is the inode and the size of its file. */
export interface Learner {
  policy: string; folder: string; running: boolean; stable: number; canary: number | null; share: number;
  frozen: boolean; order: string; journal: number[]; journal_at: number | null;
}
/** `went_well`: of `canary` and `stable`, how many sessions went well, and of how many. */
export interface Decision {
  at: number; kind: string; adapter: number | null; beside: number | null; by: string;
  person: string; why: string[]; figures: Record<string, number>; went_well: Record<string, number[]>; sessions: string[]; more_sessions: number;
}
/** An error while a search rule was matched; `rule` is empty and `turn` is -1 if it is not one's. */
export interface RuleFault { rule: string; session: string; turn: number; at: number; error: string; }
export interface Score {
  name: string; success: number; reward: number | null; trials?: number; failed?: number;
  interval?: [number, number];
}
/** `sources`: its scores by the source of the tasks, if there are several. */
export interface Evaluation extends Score {
  step: number; reward_interval?: [number, number]; sources?: Score[];
}
/** How a run is doing (proxy/run_files/verdict.py). */
export interface Verdict {
  verdict: string; step: number; sentence: string; cause: string;
  evidence: { what: string; value: number; low: number | null; high: number | null; of: number; unit: string }[];
  next: { what: string; command: string }[];
  failures: { cause: string; trials: number; of: number; trial_id: string; folder: string; lines: string[] }[];
}
/** A run in the last event of the stream; `lines`: of metrics.jsonl, each with its first byte. */
export interface EndOfRun { run: Run; lines: [number, Metrics][]; }
export interface Run {
  name: string; folder: string; status: string | null; verdict: Verdict | null;
  steps: number | null; policy_version: number | null;
  wall_s: number | null; tokens_sampled: number | null; tokens_trained: number | null;
  machine: string | null; gpus: number | null; report: boolean; error: string | null;
  evaluations: Evaluation[]; config: Record<string, string>;
}
/** A line of metrics.jsonl. */
export interface Metrics { step: number; [metric: string]: number; }
/** A line of trials.jsonl. */
export interface RunTrial {
  step: number; kind: string; group: string | null; evaluation: string | null; trial_id: string;
  task_id: string; source: string | null; agent: string | null; status: string;
  reward: number | null; turns: number; sampled_tokens: number | null; seconds: number | null;
  error: string | null; marks?: Mark[]; advantage?: number | null; trained_tokens?: number | null;
}
/** A piece of a trial's file from the byte `from` on; `bytes`: size of the file. */
export interface FilePiece { name: string; text: string; from: number; bytes: number; }
/** What a run knows of a session. */
export interface TrialOfRun { run: string | null; trial: RunTrial | null; files: FilePiece[]; }
export interface StoredEvent {
  session_id: string; seq: number; at: number; kind: string; [more: string]: unknown;
}
export interface Hit {
  session: string; index: number; cause: string | null; agent: string | null; started_at: number;
  matches: { role: string; before: string; match: string; after: string }[];
}
export interface News { begun: Head[]; answered: Head[]; events: StoredEvent[]; }
/** What a report shows (trainer/extras/report/contents.py). */
export interface Report {
  evaluations: Evaluation[]; evaluations_left_out: number;
  curves: { last: number; metrics: Record<string, [number, number][]>; left_out: number };
  troubles: { what: string; count: number; of: string; example: Cut }[];
  pairs: ReportPair[]; pairs_note: string; config: Record<string, string>; config_left_out: number;
}
export interface ReportPair { title: string; note: string; colour: string; sides: ReportSide[]; }
/** One trial: its conversation, and what judged it. */
export interface ReportSide {
  label: string; trial: RunTrial; turns: ReportTurn[]; left_out: string;
  verifier: { name: string; text: Cut }[];
}
/** `tokens`: those of the answer; null if they are not known, then `answer` is shown. */
export interface ReportTurn {
  index: number; messages: Message[]; more_messages: number; answer: Message | null;
  tokens: TokenPage | null; more_tokens: number;
}
