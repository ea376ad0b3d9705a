// Modules as a tree, with the sums of the kernels that each of them calls.

import { hierarchy, partition, type HierarchyRectangularNode } from "d3-hierarchy";
import type { Group, Memory, Module } from "./contents.ts";

export type Metric = "time" | "flops" | "bytes" | "memory" | "parameters";

export interface Sums {
  time: number;
  flops: number;
  bytes: number;
  memory: number;
  parameters: number;
}

export interface Branch {
  path: string; // "" is the whole model
  label: string;
  own: Sums; // of its own, without the modules inside
  families: Map<string, number>; // seconds of its own kernels
  children: Branch[];
}

export type Box = HierarchyRectangularNode<Branch>;

/** "model.layers.*.mlp" -> ["model", "layers.*", "mlp"]: a star belongs to the name before it. */
function namesOf(path: string): string[] {
  const names: string[] = [];
  for (const name of path.split(".")) {
    if (name === "*" && names.length) names[names.length - 1] += ".*";
    else names.push(name);
  }
  return names;
}

const nothing = (): Sums => ({ time: 0, flops: 0, bytes: 0, memory: 0, parameters: 0 });

export function treeOf(
  title: string,
  groups: readonly Group[],
  modules: Record<string, Module>,
  memory: Memory | undefined,
): Branch {
  const root: Branch = { path: "", label: title, own: nothing(), families: new Map(), children: [] };
  const byPath = new Map([["", root]]);
  const at = (path: string): Branch => {
    let branch = byPath.get(path);
    if (branch) return branch;
    const names = namesOf(path);
    const label = names[names.length - 1] ?? path;
    branch = { path, label, own: nothing(), families: new Map(), children: [] };
    byPath.set(path, branch);
    at(names.slice(0, -1).join(".")).children.push(branch);
    return branch;
  };
  for (const group of groups) {
    const branch = at(group.module);
    branch.own.time += group.seconds;
    branch.own.flops += group.flops;
    branch.own.bytes += group.bytes;
    branch.families.set(group.family, (branch.families.get(group.family) ?? 0) + group.seconds);
  }
  for (const [path, module] of Object.entries(modules)) {
    if (module.parameters) at(path).own.parameters += module.parameters;
  }
  for (const [path, size] of Object.entries(memory?.modules ?? {})) at(path).own.memory += size;
  return root;
}

/** Places in the unit square: the width of a box is its share, children lie below. */
export function boxesOf(root: Branch, metric: Metric): Box {
  const tree = hierarchy(root)
    .sum((branch) => branch.own[metric])
    .sort((a, b) => (b.value ?? 0) - (a.value ?? 0) || a.data.path.localeCompare(b.data.path));
  return partition<Branch>()(tree);
}

/** The sums of a box with all that is inside. */
export function totalOf(box: Box): Sums {
  const total = nothing();
  box.each(({ data }) => {
    for (const key of Object.keys(total) as Metric[]) total[key] += data.own[key];
  });
  return total;
}

/** The family that takes most of the time of a box. */
export function familyOf(box: Box): string {
  const seconds = new Map<string, number>();
  box.each(({ data }) => {
    for (const [name, time] of data.families) seconds.set(name, (seconds.get(name) ?? 0) + time);
  });
  let best = "";
  for (const [name, time] of seconds) if (time > (seconds.get(best) ?? -1)) best = name;
  return best;
}
