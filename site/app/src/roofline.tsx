// Kernels under the roofs of a chip: FLOP per second over FLOP per byte, both axes logarithmic.

import * as Plot from "@observablehq/plot";
import { useCallback } from "preact/hooks";
import type { Chip, Group } from "./contents.ts";
import { Figure, type Drawing } from "./figure.tsx";
import { decade, intensity, plural, rate, seconds, share } from "./numbers.ts";
import { limitWords } from "./verdict.tsx";

const MOST = 300; // points
const LEAST = 1e-9; // of the highest roof: what is below stands at the edge
const SYMBOLS: Record<string, Plot.SymbolType> = {
  compute: "circle",
  hbm: "square",
  network: "triangle",
  launch: "diamond2",
};

interface Point extends Group {
  x: number;
  y: number;
  part_of_step: number;
}

interface Props {
  chip: Chip;
  others: readonly Chip[];
  groups: readonly Group[];
  total: number; // seconds of the step
  onPick: (group: Group) => void;
}

export function Roofline({ chip, others, groups, total, onPick }: Props) {
  const points: Point[] = groups
    .filter((group) => group.useful > 0 && group.bytes > 0 && group.seconds > 0)
    .slice(0, MOST)
    .map((group) => ({
      ...group,
      x: group.useful / group.bytes,
      y: group.useful / group.seconds,
      part_of_step: group.seconds / total,
    }));
  const idle = groups.filter((group) => !group.useful && group.seconds > 0);
  const draw = useCallback(
    (width: number) => drawing(width, chip, others, points),
    [chip, others, groups, total],
  );
  if (!points.length) return <p class="empty">No kernel here computes anything.</p>;
  const waiting = idle.reduce((sum, group) => sum + group.seconds, 0) / total;
  return (
    <figure>
      <Figure
        draw={draw}
        onPick={(value) => onPick(value as Group)}
        label={`roofline of ${points.length} kinds of kernels on ${chip.title}`}
      />
      <figcaption>
        One mark for kernels that are alike; its area is their share of the step. Circle: limited by
        compute, square: HBM, triangle: network, diamond: launch. A click shows its row.{" "}
        {idle.length
          ? `Without a mark, since they compute nothing: ${plural(idle.length, "kind")}, ${share(waiting)} of the step.`
          : ""}
      </figcaption>
    </figure>
  );
}

function drawing(width: number, chip: Chip, others: readonly Chip[], points: Point[]): Drawing {
  const top = Math.max(...[chip, ...others].flatMap((c) => c.ceilings.map((roof) => roof.rate)));
  const ridges = chip.ceilings.map((roof) => roof.rate / chip.bandwidth);
  const xs = [...points.map((p) => p.x), ...ridges];
  const left = Math.min(...xs) / 3;
  const right = Math.max(...xs) * 4;
  const low = Math.max(Math.min(...points.map((p) => p.y)), top * LEAST) / 3;
  const roofs = [chip, ...others].map((c) => roofOf(c, left, right, low, c === chip, width < 560, isBeside(c, chip)));
  const narrow = width < 560;
  return Plot.plot({
    width,
    height: narrow ? 320 : 430,
    marginLeft: 52,
    marginBottom: 44,
    marginRight: 16,
    style: { fontSize: "12px", background: "none", overflow: "visible" },
    x: { type: "log", domain: [left, right], label: "FLOP per HBM byte →", tickFormat: decade, ticks: 6 },
    y: { type: "log", domain: [low, top * 2.5], label: "↑ FLOP/s while it runs", tickFormat: decade, ticks: 5, clamp: true },
    r: { range: [3, 18], domain: [0, Math.max(...points.map((p) => p.part_of_step))] },
    symbol: { domain: Object.keys(SYMBOLS), range: Object.values(SYMBOLS) },
    marks: [
      Plot.gridX({ stroke: "currentColor", strokeOpacity: 0.08 }),
      Plot.gridY({ stroke: "currentColor", strokeOpacity: 0.08 }),
      ...roofs.map(({ lines }) => lines),
      Plot.dot(points, {
        x: "x",
        y: "y",
        r: "part_of_step",
        symbol: "limit",
        fill: (p: Point) => `var(--family-${p.family}, #999)`,
        fillOpacity: 0.85,
        stroke: "var(--paper)",
        strokeWidth: 1,
        sort: { channel: "r", order: "descending" },
      }),
      ...roofs.map(({ labels }) => labels),
      Plot.tip(
        points,
        Plot.pointer({ x: "x", y: "y", title: told, maxRadius: 30, fill: "var(--paper)", lineWidth: 26 }),
      ),
    ],
  }) as Drawing;
}

function told(point: Point): string {
  const lines = [
    `${point.name}, ${limitWords(point.limit)}`,
    `${point.module || "(root)"} x ${point.calls}`,
    `${seconds(point.seconds)}, ${share(point.part_of_step)} of the step`,
    `${intensity(point.x)} FLOP/byte, ${rate(point.y)}`,
    point.shapes,
    point.formula,
  ];
  return lines.filter(Boolean).join("\n");
}

/** Whether the roofs of two chips are so near that their labels would share a place. */
const isBeside = (other: Chip, chip: Chip): boolean =>
  other !== chip &&
  chip.ceilings.some((roof) => Math.abs(Math.log((other.ceilings[0]?.rate ?? 0) / roof.rate)) < 0.15);

interface Roof {
  lines: Plot.Markish[];
  labels: Plot.Markish[]; // above all else
}

function roofOf(chip: Chip, left: number, right: number, low: number, main: boolean, narrow: boolean, beside: boolean): Roof {
  const highest = chip.ceilings[0];
  if (!highest) return { lines: [], labels: [] };
  const start = Math.max(left, low / chip.bandwidth);
  const ridge = highest.rate / chip.bandwidth;
  const slope = [
    [start, chip.bandwidth * start],
    [ridge, highest.rate],
    [right, highest.rate],
  ];
  const ink = { stroke: "currentColor", strokeOpacity: main ? 0.9 : 0.4 };
  const lower = main ? chip.ceilings.slice(1) : [];
  const label = {
    textAnchor: "end",
    fill: "currentColor",
    fillOpacity: main ? 1 : 0.7,
    stroke: "var(--paper)",
    strokeWidth: 4,
  } as const;
  return {
    lines: [
      Plot.line(slope, { ...ink, strokeWidth: main ? 2 : 1.2 }),
      ...lower.map((roof) =>
        Plot.line([[roof.rate / chip.bandwidth, roof.rate], [right, roof.rate]], {
          ...ink,
          strokeDasharray: "5,4",
          strokeOpacity: 0.6,
        }),
      ),
      Plot.dot([[ridge, highest.rate]], { r: 3.5, fill: "currentColor", fillOpacity: main ? 1 : 0.5 }),
    ],
    labels: [
      ...(main ? chip.ceilings : narrow ? [] : [highest]).map((roof) =>
        Plot.text([[right, roof.rate]], {
          ...label,
          dy: beside ? 11 : -9,
          text: () => (narrow ? `${roof.name} ${rate(roof.rate)}` : `${chip.name} ${roof.name} ${rate(roof.rate)}`),
        }),
      ),
    ],
  };
}
