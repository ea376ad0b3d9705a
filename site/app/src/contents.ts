// What a report's page is drawn from: the fields of rooftrace/reporting/html/contents.py.
// Quantities are FLOP, byte, second and FLOP/byte; a text is a place in `texts`.

export interface Ceiling {
  name: string;
  rate: number; // FLOP/s
}

export interface Chip {
  name: string;
  title: string;
  bandwidth: number; // byte/s
  capacity: number; // byte
  room: number; // of it, for the tensors of a process
  ceilings: Ceiling[]; // the highest first
}

/** A step on one chip. */
export interface OnChip {
  word: string; // what its seconds are: "expected" or "bound"
  seconds: number;
  within: [number, number] | null;
  bound: number;
  busy: number; // of all kernels, one after another
  waiting: number; // for the host
  mfu: number | null;
  rate: number | null; // items/s
  rate_per_chip: number | null;
  limits: Record<string, number>; // shares of `seconds`
  ridge: number;
}

/** Kernels that are alike, most time first: columns of equal length. */
export interface Columns {
  name: number[];
  module: number[];
  family: number[];
  part: number[];
  precision: number[];
  shapes: number[];
  formula: number[];
  ops: number[];
  joins: number[];
  source: number[];
  calls: number[];
  flops: number[];
  useful: number[]; // FLOP of what a mask lets through
  bytes: number[];
  net: number[];
  seconds: number[][]; // by chip
  limit: number[][]; // by chip
}

export interface Step {
  workload: string;
  flops: number;
  bytes: number;
  floor: number;
  intensity: number | null; // FLOP/byte
  kernels: number;
  peak: number; // byte alive at once
  item: string;
  roles: Record<string, number>;
  on: OnChip[]; // by chip
  groups: Columns;
}

export interface Held {
  what: string;
  role: string;
  module: string;
  each: string;
  count: number;
  bytes: number;
}

export interface Memory {
  peak: number;
  time: number[]; // ops run before
  op: number[];
  sizes: Record<string, number[]>; // byte, by kind
  parts: [string, number, number][];
  modules: Record<string, number>; // byte at the peak
  tensors: Held[];
}

export interface Module {
  class: string;
  count: number;
  parameters: number;
}

export interface Page {
  title: string;
  main: string;
  phases: string[];
  executions: string[];
  chips: Chip[];
  steps: Record<string, Record<string, Step>>;
  memory: Record<string, Memory>;
  modules: Record<string, Record<string, Module>>;
  texts: string[];
}

/** Kernels that are alike, on one chip. */
export interface Group {
  id: number;
  name: string;
  module: string;
  family: string;
  part: string;
  precision: string;
  shapes: string;
  formula: string;
  ops: string;
  joins: string;
  source: string;
  calls: number;
  flops: number;
  useful: number;
  bytes: number;
  net: number;
  seconds: number;
  limit: string;
}

/** The rows of a step on a chip. */
export function groupsOf(page: Page, step: Step, chip: number): Group[] {
  const { groups } = step;
  const text = (place: number | undefined): string => page.texts[place ?? -1] ?? "";
  return groups.name.map((name, i) => ({
    id: i,
    name: text(name),
    module: text(groups.module[i]),
    family: text(groups.family[i]),
    part: text(groups.part[i]),
    precision: text(groups.precision[i]),
    shapes: text(groups.shapes[i]),
    formula: text(groups.formula[i]),
    ops: text(groups.ops[i]),
    joins: text(groups.joins[i]),
    source: text(groups.source[i]),
    calls: groups.calls[i] ?? 0,
    flops: groups.flops[i] ?? 0,
    useful: groups.useful[i] ?? 0,
    bytes: groups.bytes[i] ?? 0,
    net: groups.net[i] ?? 0,
    seconds: groups.seconds[chip]?.[i] ?? 0,
    limit: text(groups.limit[chip]?.[i]),
  }));
}

/** Whether a module is another or lies inside of it. */
export function isInside(module: string, outer: string): boolean {
  return outer === "" || module === outer || module.startsWith(`${outer}.`);
}

/** The contents of the page that this script is part of; null where it shows no report. */
export function contentsOfPage(): Page | null {
  const text = document.getElementById("contents")?.textContent;
  return text ? (JSON.parse(text) as Page) : null;
}
