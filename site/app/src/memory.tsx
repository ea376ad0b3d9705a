// Memory over a step: bytes alive by kind, and what is alive where the cursor stands.

import * as Plot from "@observablehq/plot";
import { useCallback, useState } from "preact/hooks";
import type { Chip, Memory } from "./contents.ts";
import { Figure, type Drawing } from "./figure.tsx";
import { binaryTicks, capacity, share, whole } from "./numbers.ts";

const NAMES: Record<string, string> = { saved: "saved for backward", kv: "KV" };
const ORDER = [
  "weights",
  "optimizer",
  "kv",
  "gradients",
  "constants",
  "saved",
  "activations",
  "temporary",
  "optimizer temporaries",
]; // from the bottom up: what stays first, what comes and goes last

interface Props {
  memory: Memory;
  texts: readonly string[];
  chip: Chip;
  execution: string;
}

interface Moment {
  place: number;
  time: number;
}

export function MemoryOver({ memory, texts, chip, execution }: Props) {
  const kinds = ORDER.filter((kind) => memory.sizes[kind]);
  const totals = memory.time.map((_, i) =>
    kinds.reduce((sum, kind) => sum + (memory.sizes[kind]?.[i] ?? 0), 0),
  );
  const fullest = totals.indexOf(Math.max(...totals));
  const [cursor, setCursor] = useState(fullest);
  const at = Math.min(cursor, memory.time.length - 1);
  const draw = useCallback((width: number) => drawing(width, memory, kinds, totals, fullest, chip), [memory, chip]);
  const last = memory.time.length - 1;
  return (
    <figure>
      <Figure
        draw={draw}
        onPoint={(value) => setCursor(value ? (value as Moment).place : fullest)}
        label={`memory over the step: peak ${capacity(memory.peak)}`}
      />
      <label class="cursor">
        moment{" "}
        <input
          type="range"
          min={0}
          max={last}
          value={at}
          onInput={(event) => setCursor(Number(event.currentTarget.value))}
        />
      </label>
      <figcaption aria-live="polite" data-testid="alive">
        <strong>{capacity(totals[at] ?? 0)}</strong> alive after {whole(memory.time[at] ?? 0)} ops,
        at <code>{texts[memory.op[at] ?? -1]}</code> (as {execution} runs it):{" "}
        {kinds.map((kind, i) => {
          const size = memory.sizes[kind]?.[at] ?? 0;
          return size ? (
            <span>
              {i ? " " : ""}
              <i class={`swatch kind-${kind.replaceAll(" ", "-")}`} /> {NAMES[kind] ?? kind}{" "}
              {capacity(size)} ({share(size / (totals[at] || 1))})
            </span>
          ) : null;
        })}
      </figcaption>
    </figure>
  );
}

function drawing(
  width: number,
  memory: Memory,
  kinds: readonly string[],
  totals: readonly number[],
  fullest: number,
  chip: Chip,
): Drawing {
  // A step of one moment is drawn as wide as any other.
  const times = memory.time.length > 1 ? memory.time : [0, 1];
  const cells = kinds.flatMap((kind) =>
    times.map((time, i) => ({ time, kind, size: memory.sizes[kind]?.[Math.min(i, totals.length - 1)] ?? 0 })),
  );
  const moments: Moment[] = memory.time.map((time, place) => ({ time, place }));
  const near = chip.capacity <= 2 * memory.peak;
  const end = times[times.length - 1] ?? 1;
  const parts = memory.parts.length > 1 ? memory.parts : [];
  const most = 1.08 * Math.max(memory.peak, near ? chip.capacity : 0);
  return Plot.plot({
    width,
    height: width < 560 ? 260 : 320,
    marginLeft: 72,
    marginTop: 28,
    marginBottom: 42,
    style: { fontSize: "12px", background: "none", overflow: "visible" },
    x: { domain: [0, end], label: "ops run →", tickFormat: whole },
    y: {
      domain: [0, most],
      label: null,
      tickFormat: (size: number) => (size ? capacity(size) : "0"),
      ticks: binaryTicks(most, 5),
      grid: true,
    },
    marks: [
      Plot.areaY(cells, {
        x: "time",
        y: "size",
        z: "kind",
        order: [...kinds],
        fill: (cell: { kind: string }) => `var(--kind-${cell.kind.replaceAll(" ", "-")}, #999)`,
      }),
      ...(near
        ? [
            Plot.ruleY([chip.capacity], { stroke: "currentColor", strokeDasharray: "6,4", strokeWidth: 1.5 }),
            Plot.text([[end, chip.capacity]], {
              text: () => `capacity of ${chip.name}`,
              textAnchor: "end",
              dy: -8,
              fill: "currentColor",
            }),
          ]
        : []),
      Plot.ruleX(
        parts.filter(([, start]) => start > 0),
        { x: (part: [string, number, number]) => part[1], stroke: "currentColor", strokeDasharray: "2,3" },
      ),
      Plot.text(parts, {
        x: (part: [string, number, number]) => part[2],
        frameAnchor: "top",
        text: (part: [string, number, number]) => ((part[2] - part[1]) / end > 0.06 ? part[0] : ""),
        textAnchor: "end",
        dy: -14,
        dx: -4,
        fill: "currentColor",
      }),
      Plot.dot([[memory.time[fullest] ?? 0, totals[fullest] ?? 0]], {
        symbol: "triangle",
        rotate: 180,
        dy: -6,
        fill: "currentColor",
      }),
      Plot.ruleX(moments, Plot.pointerX({ x: "time", stroke: "currentColor", strokeWidth: 1.2 })),
    ],
  }) as Drawing;
}
