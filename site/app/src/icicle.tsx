// Where it goes: modules as boxes as wide as their share, those inside below them.

import { useMemo, useRef, useState } from "preact/hooks";
import type { Group, Memory, Module } from "./contents.ts";
import { bytes, capacity, count, flop, seconds, share } from "./numbers.ts";
import { boxesOf, familyOf, totalOf, treeOf, type Box, type Metric } from "./tree.ts";

const LEAST = 0.0012; // of the width: what is narrower is not seen
const ROW = 34; // px

export const WRITTEN: Record<Metric, (value: number) => string> = {
  time: seconds,
  flops: flop,
  bytes,
  memory: capacity,
  parameters: count,
};

interface Props {
  title: string;
  groups: readonly Group[];
  modules: Record<string, Module>;
  memory: Memory | undefined;
  metric: Metric;
  module: string;
  search: string;
  onZoom: (module: string) => void;
}

export function Icicle({ title, groups, modules, memory, metric, module, search, onZoom }: Props) {
  const tree = useMemo(() => treeOf(title, groups, modules, memory), [title, groups, modules, memory]);
  const root = useMemo(() => boxesOf(tree, metric), [tree, metric]);
  const [pointed, setPointed] = useState<string | null>(null);
  const place = useRef<HTMLDivElement>(null);
  const zoomed = root.find((box) => box.data.path === module) ?? root;
  const whole = zoomed.x1 - zoomed.x0;
  const boxes = zoomed
    .descendants()
    .filter((box) => whole > 0 && (box.x1 - box.x0) / whole >= LEAST);
  const deepest = Math.max(...boxes.map((box) => box.depth), zoomed.depth);
  const above = zoomed.ancestors().reverse().slice(0, -1);
  const asked = search.trim().toLowerCase();
  const shown = boxes.find((box) => box.data.path === pointed) ?? zoomed;

  const move = (box: Box, event: KeyboardEvent) => {
    const beside = box.parent?.children?.filter((other) => boxes.includes(other)) ?? [];
    const next: Record<string, Box | null | undefined> = {
      ArrowLeft: beside[beside.indexOf(box) - 1],
      ArrowRight: beside[beside.indexOf(box) + 1],
      ArrowUp: box === zoomed ? null : box.parent,
      ArrowDown: box.children?.find((child) => boxes.includes(child)),
    };
    if (event.key === "Escape") onZoom(zoomed.parent?.data.path ?? "");
    else if (next[event.key]) {
      const path = next[event.key]?.data.path ?? "";
      place.current?.querySelector<HTMLElement>(`[data-path="${CSS.escape(path)}"]`)?.focus();
    } else return;
    event.preventDefault();
  };

  return (
    <div>
      <nav class="crumbs" aria-label="zoomed into">
        {above.map((box) => (
          <>
            <button type="button" onClick={() => onZoom(box.data.path)}>
              {box.data.label}
            </button>
            {" › "}
          </>
        ))}
        <strong>{zoomed.data.label}</strong>
      </nav>
      <div
        class="icicle"
        ref={place}
        role="tree"
        aria-label={`modules by ${metric}`}
        style={{ height: `${(deepest - zoomed.depth + 1) * ROW}px` }}
        onMouseLeave={() => setPointed(null)}
      >
        {whole > 0 ? null : <p class="empty">Nothing here has {metric}.</p>}
        {boxes.map((box) => {
          const { path, label } = box.data;
          const wide = (box.x1 - box.x0) / whole;
          const found = asked !== "" && path.toLowerCase().includes(asked);
          const family = familyOf(box);
          return (
            <button
              type="button"
              role="treeitem"
              key={path}
              data-path={path}
              aria-level={box.depth + 1}
              tabIndex={box === zoomed ? 0 : -1}
              class={`box family-${family}${found ? " found" : ""}${asked && !found ? " dim" : ""}`}
              style={{
                left: `${((box.x0 - zoomed.x0) / whole) * 100}%`,
                width: `${wide * 100}%`,
                top: `${(box.depth - zoomed.depth) * ROW}px`,
              }}
              onClick={() => onZoom(box === zoomed ? (box.parent?.data.path ?? "") : path)}
              onMouseEnter={() => setPointed(path)}
              onFocus={() => setPointed(path)}
              onKeyDown={(event) => move(box, event)}
              aria-label={`${path || title}: ${WRITTEN[metric](box.value ?? 0)}, ${share((box.value ?? 0) / (root.value || 1))}`}
            >
              {wide > 0.03 ? (
                <span>
                  {label} <small>{share((box.value ?? 0) / (root.value || 1))}</small>
                </span>
              ) : null}
            </button>
          );
        })}
      </div>
      <Inspected box={shown} root={root} module={modules[shown.data.path]} title={title} />
    </div>
  );
}

interface InspectedProps {
  box: Box;
  root: Box;
  module: Module | undefined;
  title: string;
}

/** The sums of the box under the pointer or the focus, with all that is inside of it. */
function Inspected({ box, root, module, title }: InspectedProps) {
  const total = totalOf(box);
  const whole = totalOf(root);
  const kind = module?.class ? `${module.class}${module.count > 1 ? ` x ${module.count}` : ""}` : "";
  const facts: [string, Metric][] = [
    ["time", "time"],
    ["FLOP", "flops"],
    ["HBM", "bytes"],
    ["memory at the peak", "memory"],
    ["parameters", "parameters"],
  ];
  return (
    <p class="inspected" aria-live="polite">
      <code>{box.data.path || title}</code> {kind ? `${kind}: ` : ""}
      {facts.map(([name, key], i) => (
        <>
          {i ? ", " : ""}
          <span>
            {name} {WRITTEN[key](total[key])} ({share(whole[key] ? total[key] / whole[key] : null)})
          </span>
        </>
      ))}
    </p>
  );
}
