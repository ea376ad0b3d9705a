// What a reader has chosen, kept in the address of the page so that a link shows the same.

import type { Page } from "./contents.ts";
import type { Metric } from "./tree.ts";

export interface Choice {
  phase: string;
  execution: string;
  chip: number;
  metric: Metric;
  module: string; // the one that is zoomed into
  search: string;
  price: string; // dollars for an hour of a chip
}

export const METRICS: readonly Metric[] = ["time", "flops", "bytes", "memory", "parameters"];

export function firstChoice(page: Page): Choice {
  const asked = new URLSearchParams(location.hash.slice(1));
  const one = (name: string, values: readonly string[], otherwise: string): string => {
    const value = asked.get(name) ?? "";
    return values.includes(value) ? value : otherwise;
  };
  const chips = page.chips.map((chip) => chip.name);
  return {
    phase: one("phase", page.phases, page.phases[0] ?? ""),
    execution: one("execution", page.executions, page.main),
    chip: Math.max(0, chips.indexOf(one("chip", chips, ""))),
    metric: one("by", METRICS, "time") as Metric,
    module: asked.get("module") ?? "",
    search: asked.get("search") ?? "",
    price: asked.get("price") ?? "",
  };
}

export function keepChoice(page: Page, choice: Choice): void {
  const shown = new URLSearchParams({ phase: choice.phase, execution: choice.execution });
  if (page.chips.length > 1) shown.set("chip", page.chips[choice.chip]?.name ?? "");
  if (choice.metric !== "time") shown.set("by", choice.metric);
  if (choice.module) shown.set("module", choice.module);
  if (choice.search) shown.set("search", choice.search);
  if (choice.price) shown.set("price", choice.price);
  try {
    history.replaceState(null, "", `#${shown}`);
  } catch {
    // A page inside a frame without an address of its own keeps no choice.
  }
}
