// Kernels under the roofs of a chip: FLOP per second over FLOP per byte, both axes logarithmic.

import * as Plot from "@observablehq/plot";
import { useCallback } from "preact/hooks";
import type { Chip, Group } from "./contents.ts";
import { Figure, type Drawing } from "./figure.tsx";
import { decade, intensity, plural, rate, seconds, share } from "./numbers.ts";
import { limitWords } from "./verdict.tsx";

const MOST = 300; // points
const LEAST = 1e-9; // of the highest roof: what is below stands at the edge
const RADII = [3, 18] as const; // pixels
const MARGIN = { top: 20, left: 52, bottom: 44, right: 16 } as const; // pixels
const LETTER = 6.5; // pixels of a letter of a label, about
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
  const narrow = width < 560;
  const height = narrow ? 320 : 430;
  const domain = { x: [left, right], y: [low, top * 2.5] } as const;
  const most = Math.max(...points.map((p) => p.part_of_step));
  const at = (x: number, y: number): [number, number] => [
    MARGIN.left + along(domain.x, x) * (width - MARGIN.left - MARGIN.right),
    height - MARGIN.bottom - along(domain.y, y) * (height - MARGIN.bottom - MARGIN.top),
  ];
  const marks = points.map((p): Box => {
    const [x, y] = at(p.x, p.y);
    const r = RADII[0] + (RADII[1] - RADII[0]) * Math.sqrt(p.part_of_step / most);
    return { left: x - r, right: x + r, top: y - r, bottom: y + r };
  });
  const roofs = [chip, ...others];
  return Plot.plot({
    width,
    height,
    marginTop: MARGIN.top,
    marginLeft: MARGIN.left,
    marginBottom: MARGIN.bottom,
    marginRight: MARGIN.right,
    style: { fontSize: "12px", background: "none", overflow: "visible" },
    x: { type: "log", domain: domain.x, label: "FLOP per HBM byte →", tickFormat: decade, ticks: 6 },
    y: { type: "log", domain: domain.y, label: "↑ FLOP/s while it runs", tickFormat: decade, ticks: 5, clamp: true },
    r: { range: RADII, domain: [0, most] },
    symbol: { domain: Object.keys(SYMBOLS), range: Object.values(SYMBOLS) },
    marks: [
      Plot.gridX({ stroke: "currentColor", strokeOpacity: 0.08 }),
      Plot.gridY({ stroke: "currentColor", strokeOpacity: 0.08 }),
      ...roofs.map((c) => linesOf(c, left, right, low, c === chip)),
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
      ...namesOf(chip, narrow ? [] : others, at, right, narrow, marks),
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

/** How far along a logarithmic axis a value lies: 0 at its beginning, 1 at its end. */
const along = ([from, to]: readonly [number, number], value: number): number =>
  Math.log(Math.max(value, from) / from) / Math.log(to / from);

function linesOf(chip: Chip, left: number, right: number, low: number, main: boolean): Plot.Markish[] {
  const highest = chip.ceilings[0];
  if (!highest) return [];
  const start = Math.max(left, low / chip.bandwidth);
  const ridge = highest.rate / chip.bandwidth;
  const slope = [
    [start, chip.bandwidth * start],
    [ridge, highest.rate],
    [right, highest.rate],
  ];
  const ink = { stroke: "currentColor", strokeOpacity: main ? 0.9 : 0.4 };
  const lower = main ? chip.ceilings.slice(1) : [];
  return [
    Plot.line(slope, { ...ink, strokeWidth: main ? 2 : 1.2 }),
    ...lower.map((roof) =>
      Plot.line([[roof.rate / chip.bandwidth, roof.rate], [right, roof.rate]], {
        ...ink,
        strokeDasharray: "5,4",
        strokeOpacity: 0.6,
      }),
    ),
    Plot.dot([[ridge, highest.rate]], { r: 3.5, fill: "currentColor", fillOpacity: main ? 1 : 0.5 }),
  ];
}

interface Box {
  left: number; // pixels, as all
  right: number;
  top: number;
  bottom: number;
}

const meets = (one: Box, other: Box): boolean =>
  one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom;

/** The names of ceilings: a lower one's left of the slope, where no mark can be; of each, the place
 * that meets the fewest marks and lines, and no other name. */
function namesOf(
  chip: Chip,
  others: readonly Chip[],
  at: (x: number, y: number) => [number, number],
  right: number,
  narrow: boolean,
  marks: readonly Box[],
): Plot.Markish[] {
  const taken: Box[] = [];
  const named = [chip, ...others].flatMap((each) =>
    each.ceilings.slice(0, each === chip ? undefined : 1).map((roof, rank) => {
      const [end, y] = at(right, roof.rate);
      const [start] = at(roof.rate / each.bandwidth, roof.rate);
      return { each, roof, rank, start, end, y };
    }),
  );
  const inTheWay = [...marks, ...named.map(({ start, end, y }) => ({ left: start, right: end, top: y - 1, bottom: y + 1 }))];
  return named.map(({ each, roof, rank, start, end, y }) => {
    const said = `${roof.name} ${rate(roof.rate)}`;
    const text = narrow ? said.replace("FLOP/s", "") : `${each.name} ${said}`; // as the axis says
    const beside = { x: start - 9, y };
    const ends = [-9, 11, -23].map((dy) => ({ x: end, y: y + dy }));
    const boxes = (rank ? [beside, ...ends] : [...ends, beside]).map((spot) => {
      const box = { left: spot.x - text.length * LETTER, right: spot.x, top: spot.y - 7, bottom: spot.y + 7 };
      const met = inTheWay.filter((mark) => meets(mark, box)).length;
      const names = taken.filter((name) => meets(name, box)).length;
      return { box, cost: met + 1e3 * names + (box.left < MARGIN.left ? 1e6 : 0) };
    });
    const { box } = boxes.reduce((best, next) => (next.cost < best.cost ? next : best));
    taken.push(box);
    return Plot.text([text], {
      frameAnchor: "top-left",
      dx: box.right - MARGIN.left,
      dy: (box.top + box.bottom) / 2 - MARGIN.top,
      lineAnchor: "middle",
      textAnchor: "end",
      fill: "currentColor",
      fillOpacity: each === chip ? 1 : 0.7,
      stroke: "var(--paper)",
      strokeWidth: 4,
    });
  });
}
