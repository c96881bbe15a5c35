/** Answers of the viewer's API, as the server in agentrl/viewer sends them. Unknown numbers are null. */

export type Num = number | null;
export type Column = Num[];
export type RunState = "running" | "finished" | "interrupted" | "crashed" | "stalled";

export interface Source {
  key: string;
  kind: "run" | "evaluation";
  path: string;
  name: string;
  state: RunState;
  step: Num;
  steps: Num;
  environments: string[];
  model: string | null;
  started: Num;
  updated: Num;
  success: Num;
  reward: Num;
  sparkline: Column;
  index: IndexProgress | null;
  problem?: string | null;
}

/** How much of a store the server has read. */
export interface IndexProgress {
  done_bytes: number;
  total_bytes: number;
  complete?: boolean;
  problem?: string | null;
}

/** A file with records that the server cannot read. */
export interface DamagedFile {
  file: string;
  records: number;
  /** Line numbers of the first ones, from 1. */
  lines: number[];
}

/** A finding of the diagnosis. */
export interface Problem {
  text: string;
  evidence?: string[];
  example?: { id: string; task_id: string } | null;
}

export interface SourceDetail extends Source {
  config: Record<string, unknown>;
  command: string | null;
  splits: Record<string, string[]>;
  has_tokens: boolean;
  problems: (Problem | string)[];
  damage: DamagedFile[];
}

export interface Metrics {
  names: string[];
  steps: number[];
  columns: Record<string, Column>;
  intervals: Record<string, { low: Column; high: Column }>;
  evaluations: { step: number; success: Num; low: Num; high: Num; episodes: number }[];
  groups: { title: string; names: string[] }[];
}

export interface TaskTypeRow {
  environment: string;
  task_type: string | null;
  split: string | null;
  episodes: number;
  success: Num;
  low: Num;
  high: Num;
  reward: Num;
}

export interface Outcomes {
  steps: number[];
  outcomes: Record<string, number[]>;
  by_task_type: TaskTypeRow[];
}

export interface EpisodeRow {
  number: number;
  id: string;
  step: number;
  complete: boolean;
  environment: string;
  split: string | null;
  task_id: string;
  task_type: string | null;
  group_id: string;
  member: Num;
  attempt: number;
  outcome: string | null;
  error: string | null;
  reward: Num;
  success: boolean | null;
  turns: number;
  sequences: number;
  tokens: number;
  sampled_tokens: number;
  oldest_version: Num;
  newest_version: Num;
  roles: string[];
  invalid: number;
  truncated: boolean;
  started_at: Num;
  ended_at: Num;
  seconds: Num;
}

export interface EpisodePage {
  /** Null while a text search has not read all episodes. */
  total: number | null;
  /** Episodes that a text search has not read yet. */
  unsearched?: number | null;
  index?: IndexProgress | null;
  rows: EpisodeRow[];
  cursor: string | null;
  damage: DamagedFile[];
  facets: { environments: string[]; splits: string[]; outcomes: string[]; roles: string[]; task_types: string[] };
}

export type PartKind =
  | "system"
  | "user"
  | "assistant"
  | "thinking"
  | "tool_call"
  | "tool_result"
  | "observation"
  | "remark"
  | "image";

export interface Part {
  kind: PartKind;
  text?: string | null;
  name?: string | null;
  arguments?: unknown;
  data?: string | null;
  invalid?: boolean;
}

export const ACTIVITIES = ["queue", "prefill", "decode", "tool", "environment", "scoring"] as const;
export type Activity = (typeof ACTIVITIES)[number];
export type Timings = Partial<Record<Activity, Num>> & { started?: Num };

export interface Turn {
  number: number | null;
  role: string;
  start: Num;
  end: Num;
  parts: Part[];
  timings: Timings | null;
  version: Num;
  finish_reason: string | null;
  reward: Num;
  invalid: boolean;
  error: string | null;
}

export interface Sequence {
  role: string | null;
  parent: Num;
  shared: number;
  tokens: number;
  turns: Turn[];
}

export interface Note {
  id: string;
  episode: string;
  text: string;
  time: number;
  turn: number | null;
}

export interface Episode {
  row: EpisodeRow;
  sequences: Sequence[];
  log: string | null;
  error: string | null;
  replay: string | null;
  chat: unknown[];
  branches_from: unknown;
  notes: Note[];
  seed?: number;
  reward_components?: Record<string, number>;
  reward_sources?: Record<string, number>;
  metrics?: Record<string, number>;
}

export interface TokenColumns {
  sources: string[];
  text: string[];
  id: number[];
  source: number[];
  special: number[];
  trained: number[];
  logprob: Column | null;
  version: Column | null;
  turn: Column | null;
  advantage: Column | null;
  ratio: Column | null;
  entropy: Column | null;
  trainer_logprob: Column | null;
  clipped: Column | null;
  masked_by: (string | null)[] | null;
  overlay_problem?: string | null;
  tokenizer_problem?: string | null;
}

export interface PartsAt {
  sequence: number;
  position: number;
  turn: number | null;
}

export interface Group {
  group: string;
  task: string;
  mean: Num;
  std: Num;
  members: { row: EpisodeRow; advantage: Num; parts_at: PartsAt | null }[];
  first_difference: { position: number; turn: number | null } | null;
}

export interface InFlightEpisode {
  id: string;
  environment: string;
  task: string;
  state: string;
  since: Num;
  turns: { role: string; text: string }[];
}

export interface InFlight {
  state: string;
  time: Num;
  in_flight: InFlightEpisode[];
  live: LiveTraffic | null;
}

export interface LiveTraffic {
  url: string;
  open: number;
  waiting: number;
  batch: number;
  counts: Record<string, number>;
}

export interface TaskSide {
  episodes: number;
  success: Num;
  reward: Num;
}

export interface Comparison {
  tasks: { task: string; environment: string; a: TaskSide; b: TaskSide; result: "won" | "lost" | "same" }[];
  won: number;
  lost: number;
  same: number;
  only_a: number | string[];
  only_b: number | string[];
  panels: { a: string | null; b: string | null; match: "same" | "different" | "unknown" };
  test: { name: string; p: Num; difference: Num; low: Num; high: Num } | null;
}
