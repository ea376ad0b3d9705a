// The numbers of the chosen step, and what limits it.

import type { Chip, OnChip, Step } from "./contents.ts";
import { capacity, bytes, count, flop, intensity, MISSING, seconds, share, whole } from "./numbers.ts";

const LIMITS: Record<string, string> = {
  compute: "compute",
  hbm: "HBM",
  network: "network",
  launch: "launch",
};

export const limitWords = (limit: string): string => LIMITS[limit] ?? limit;

function Fact({ name, value, about }: { name: string; value: string; about?: string }) {
  return (
    <div class="fact">
      <dt>{name}</dt>
      <dd>
        {value}
        {about ? <small>{about}</small> : null}
      </dd>
    </div>
  );
}

interface Props {
  step: Step;
  on: OnChip;
  chip: Chip;
  peak: number | undefined;
}

export function Verdict({ step, on, chip, peak }: Props) {
  const shares = Object.entries(on.limits)
    .filter(([, part]) => part > 0)
    .sort((a, b) => b[1] - a[1]);
  const within = on.within ? `90 % within ${seconds(on.within[0])} to ${seconds(on.within[1])}` : "";
  const fits = peak === undefined || peak <= chip.capacity;
  return (
    <div class="verdict" data-testid="verdict">
      <dl>
        <Fact name={on.word} value={seconds(on.seconds)} about={within} />
        <Fact name="at least" value={seconds(on.bound)} about="datasheet rates, perfect overlap" />
        <Fact
          name={`${step.item}s/s`}
          value={on.rate === null ? MISSING : count(on.rate)}
          about={step.workload}
        />
        <Fact name="FLOP" value={flop(step.flops)} about={`${share(on.mfu)} MFU`} />
        <Fact
          name="HBM bytes"
          value={bytes(step.bytes)}
          about={`${intensity(step.flops / step.bytes)} FLOP/byte, ridge ${intensity(on.ridge)}`}
        />
        <Fact name="kernels" value={whole(step.kernels)} about={`waits ${seconds(on.waiting)}`} />
        {peak === undefined ? null : (
          <Fact
            name="peak memory"
            value={capacity(peak)}
            about={`${fits ? "fits" : "does not fit"} ${capacity(chip.capacity)}`}
          />
        )}
      </dl>
      <div class="limits" role="img" aria-label={shares.map(([n, s]) => `${n} ${share(s)}`).join(", ")}>
        {shares.map(([name, part]) => (
          <span class={`limit-${name}`} style={{ flexGrow: part }} title={`${limitWords(name)} ${share(part)}`} />
        ))}
      </div>
      <p class="key">
        limited by{" "}
        {shares.map(([name, part], i) => (
          <span>
            {i ? ", " : ""}
            <i class={`swatch limit-${name}`} /> {limitWords(name)} {share(part)}
          </span>
        ))}
      </p>
    </div>
  );
}
