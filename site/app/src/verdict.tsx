// The numbers of the chosen step, and what limits it.

import type { Chip, Group, OnChip, Step } from "./contents.ts";
import { bytes, capacity, count, digits, flop, intensity, MISSING, seconds, share, whole } from "./numbers.ts";

const LIMITS: Record<string, string> = {
  compute: "compute",
  hbm: "HBM",
  network: "network",
  launch: "launch",
};

const NAMED = 4; // parts of a bar that are named

export const limitWords = (limit: string): string => LIMITS[limit] ?? limit;

function Fact({ name, value, about }: { name: string; value: string; about?: string }) {
  return (
    <div class="fact">
      <dt>{name}</dt>
      <dd>
        {value}
        {about ? <small>{about.replace(/(\d) (?=[%a-z])/gi, "$1\u00a0")}</small> : null}
      </dd>
    </div>
  );
}

/** Shares of the step as a bar, the largest first, with the largest in words. */
function Bar({ legend, kind, parts }: { legend: string; kind: string; parts: [string, number][] }) {
  const shares = parts.filter(([, part]) => part > 0).sort((a, b) => b[1] - a[1]);
  const told = shares.slice(0, NAMED);
  const rest = shares.slice(NAMED).reduce((sum, [, part]) => sum + part, 0);
  return (
    <>
      <p class="key">{legend}</p>
      <div class="limits" role="img" aria-label={shares.map(([n, s]) => `${n} ${share(s)}`).join(", ")}>
        {shares.map(([name, part]) => (
          <span class={`${kind}-${name}`} style={{ flexGrow: part }} title={`${limitWords(name)} ${share(part)}`} />
        ))}
      </div>
      <p class="key">
        {told.map(([name, part], i) => (
          <span>
            <i class={`swatch ${kind}-${name}`} /> {limitWords(name)} {share(part)}
            {i < told.length - 1 || rest > 0 ? ", " : ""}
          </span>
        ))}
        {rest > 0 ? <span>other {share(rest)}</span> : null}
      </p>
    </>
  );
}

/** Dollars at a price of an hour of a chip; without a price the time of a chip. */
function costOf(hours: number, price: number): string {
  if (price) return `$${Number((hours * price).toPrecision(3)).toLocaleString("en-US", { maximumSignificantDigits: 3 })}`;
  return hours < 1 ? seconds(hours * 3600) : `${digits(hours)} h`;
}

interface Props {
  step: Step;
  on: OnChip;
  chip: Chip;
  groups: readonly Group[];
  price: string;
}

export function Verdict({ step, on, chip, groups, price }: Props) {
  const hours = on.rate_per_chip ? 1e6 / on.rate_per_chip / 3600 : null; // of a chip, for a million items

  const [limit, part] = Object.entries(on.limits).sort((a, b) => b[1] - a[1])[0] ?? ["", 0];
  const within = on.within ? `90 % within ${seconds(on.within[0])} to ${seconds(on.within[1])}` : "";
  const fits = step.peak <= chip.room;
  const families = new Map<string, number>();
  for (const { family, seconds: time } of groups) {
    families.set(family, (families.get(family) ?? 0) + time / on.seconds);
  }
  return (
    <div class="verdict" data-testid="verdict">
      <dl>
        <Fact name={on.word} value={seconds(on.seconds)} about={within} />
        <Fact
          name="at least"
          value={seconds(on.bound)}
          about={`${on.word}: ${(on.seconds / on.bound).toFixed(2)} times as long`}
        />
        <Fact name="limited by" value={limitWords(limit)} about={`${share(part)} of the step`} />
        <Fact
          name="peak memory"
          value={capacity(step.peak)}
          about={`${fits ? "fits" : "does not fit"}: ${share(step.peak / chip.capacity)} of ${capacity(chip.capacity)}`}
        />
        <Fact
          name={`${step.item}s/s`}
          value={on.rate === null ? MISSING : count(on.rate)}
          about={step.workload}
        />
        <Fact
          name="cost"
          value={hours === null ? MISSING : costOf(hours, Number(price))}
          about={`${Number(price) ? "" : "of a chip "}for a million ${step.item}s`}
        />
        <Fact name="FLOP" value={flop(step.flops)} about={`${share(on.mfu)} MFU`} />
        <Fact
          name="HBM bytes"
          value={bytes(step.bytes)}
          about={`${intensity(step.intensity ?? NaN)} FLOP/byte, ridge ${intensity(on.ridge)}`}
        />
      </dl>
      <Bar legend="limited by" kind="limit" parts={Object.entries(on.limits)} />
      <Bar legend={`time of ${whole(step.kernels)} kernels by family`} kind="family" parts={[...families]} />
    </div>
  );
}
