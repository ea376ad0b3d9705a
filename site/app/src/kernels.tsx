// The kernels of a step as rows that are sorted, filtered and opened.

import { useEffect, useState } from "preact/hooks";
import type { Group } from "./contents.ts";
import { bytes, flop, intensity, MISSING, seconds, share, whole } from "./numbers.ts";
import { limitWords } from "./verdict.tsx";

const FIRST = 25; // rows before a reader asks for more
const MORE = 200;

type Key = "name" | "limit" | "module" | "calls" | "flops" | "bytes" | "intensity" | "seconds";

const HEADS: readonly { key: Key; head: string; number: boolean }[] = [
  { key: "name", head: "Kernel", number: false },
  { key: "limit", head: "Limited by", number: false },
  { key: "module", head: "Module", number: false },
  { key: "calls", head: "Calls", number: true },
  { key: "flops", head: "FLOP", number: true },
  { key: "bytes", head: "HBM", number: true },
  { key: "intensity", head: "FLOP/byte", number: true },
  { key: "seconds", head: "Time", number: true },
];

const ratioOf = (group: Group): number => (group.bytes ? group.useful / group.bytes : 0);
const valueOf = (group: Group, key: Key): string | number =>
  key === "intensity" ? ratioOf(group) : group[key];

interface Props {
  groups: readonly Group[];
  total: number; // seconds of the step
  search: string;
  picked: number | null; // id of a group
  onPick: (id: number | null) => void;
}

export function Kernels({ groups, total, search, picked, onPick }: Props) {
  const [by, setBy] = useState<{ key: Key; up: boolean }>({ key: "seconds", up: false });
  const [most, setMost] = useState(FIRST);
  const asked = search.trim().toLowerCase();
  const rows = groups
    .filter(
      (group) =>
        !asked ||
        [group.name, group.module, group.family, group.part, limitWords(group.limit), group.ops]
          .some((text) => text.toLowerCase().includes(asked)),
    )
    .sort((a, b) => {
      const [x, y] = [valueOf(a, by.key), valueOf(b, by.key)];
      const order = typeof x === "string" ? x.localeCompare(String(y)) : x - Number(y);
      return (by.up ? order : -order) || a.id - b.id;
    });
  const place = rows.findIndex((group) => group.id === picked);
  useEffect(() => {
    if (picked === null) return;
    if (place >= most) setMost(place + 1);
    else document.getElementById(`kernel-${picked}`)?.scrollIntoView({ block: "center" });
  }, [picked, place, most]);
  const sort = (key: Key, number: boolean) =>
    setBy((now) => ({ key, up: now.key === key ? !now.up : !number }));
  const seen = rows.reduce((sum, group) => sum + group.seconds, 0);
  return (
    <div>
      <div class="table">
        <table class="kernels">
          <thead>
            <tr>
              {HEADS.map(({ key, head, number }) => (
                <th
                  scope="col"
                  class={number ? "number" : ""}
                  aria-sort={by.key !== key ? "none" : by.up ? "ascending" : "descending"}
                >
                  <button type="button" onClick={() => sort(key, number)}>
                    {head}
                  </button>
                </th>
              ))}
              <th scope="col" class="number">
                Share
              </th>
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, most).map((group) => (
              <>
                <tr id={`kernel-${group.id}`} class={group.id === picked ? "picked" : ""}>
                  <td>
                    <button
                      type="button"
                      class="open"
                      aria-expanded={group.id === picked}
                      onClick={() => onPick(group.id === picked ? null : group.id)}
                    >
                      <i class={`swatch family-${group.family}`} />
                      <code>{group.name}</code>
                    </button>
                  </td>
                  <td>
                    <i class={`swatch limit-${group.limit}`} /> {limitWords(group.limit)}
                  </td>
                  <td class="path">
                    <code>{group.module || "(root)"}</code>
                  </td>
                  <td class="number">{whole(group.calls)}</td>
                  <td class="number">{flop(group.flops)}</td>
                  <td class="number">{bytes(group.bytes)}</td>
                  <td class="number">{group.bytes ? intensity(ratioOf(group)) : MISSING}</td>
                  <td class="number">{seconds(group.seconds)}</td>
                  <td class="number">{share(group.seconds / total)}</td>
                </tr>
                {group.id === picked ? <Opened group={group} /> : null}
              </>
            ))}
          </tbody>
        </table>
      </div>
      <p class="more" aria-live="polite">
        {whole(Math.min(most, rows.length))} of {whole(rows.length)} kinds of kernels; all{" "}
        {asked ? "that match " : ""}take {seconds(seen)}.{" "}
        {rows.length > most ? (
          <button type="button" onClick={() => setMost(most + MORE)}>
            show {whole(Math.min(MORE, rows.length - most))} more
          </button>
        ) : null}
      </p>
    </div>
  );
}

function Opened({ group }: { group: Group }) {
  const facts: [string, string][] = [
    ["family", `${group.family}, ${group.part}${group.precision ? `, ${group.precision}` : ""}`],
    ["shapes", group.shapes],
    ["formula", group.formula],
    ["ops", group.ops],
    ["one kernel because", group.joins],
    ["code", group.source],
    ["each call", `${seconds(group.seconds / (group.calls || 1))}, ${flop(group.flops / (group.calls || 1))}, ${bytes(group.bytes / (group.calls || 1))}`],
  ];
  return (
    <tr class="opened">
      <td colSpan={9}>
        <dl>
          {facts
            .filter(([, text]) => text)
            .map(([name, text]) => (
              <div>
                <dt>{name}</dt>
                <dd>{text}</dd>
              </div>
            ))}
        </dl>
      </td>
    </tr>
  );
}
