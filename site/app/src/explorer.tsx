// The part of a report's page that answers: choices, what limits, where it goes, roofline, memory.

import { useEffect, useMemo, useState } from "preact/hooks";
import { groupsOf, isInside, type Page } from "./contents.ts";
import { Icicle } from "./icicle.tsx";
import { Kernels } from "./kernels.tsx";
import { MemoryOver } from "./memory.tsx";
import { seconds } from "./numbers.ts";
import { Roofline } from "./roofline.tsx";
import { firstChoice, keepChoice, METRICS, type Choice } from "./state.ts";
import { Switch } from "./switches.tsx";
import { Verdict } from "./verdict.tsx";

const NAMES: Record<string, string> = { flops: "FLOP", bytes: "HBM bytes" };
const named = (values: readonly string[]) =>
  values.map((value) => ({ value, label: NAMES[value] ?? value }));

export function Explorer({ page }: { page: Page }) {
  const [choice, setChoice] = useState<Choice>(() => firstChoice(page));
  const [picked, setPicked] = useState<number | null>(null);
  useEffect(() => keepChoice(page, choice), [page, choice]);
  const change = (part: Partial<Choice>) => {
    setPicked(null);
    setChoice((now) => ({ ...now, ...part }));
  };
  const step = page.steps[choice.phase]?.[choice.execution];
  const chip = page.chips[choice.chip];
  const groups = useMemo(
    () => (step ? groupsOf(page, step, choice.chip) : []),
    [page, step, choice.chip],
  );
  const inside = useMemo(
    () => groups.filter((group) => isInside(group.module, choice.module)),
    [groups, choice.module],
  );
  const others = useMemo(() => page.chips.filter((other) => other !== chip), [page, chip]);
  const on = step?.on[choice.chip];
  if (!step || !chip || !on) return null;
  const memory = page.memory[choice.phase];
  return (
    <>
      <div class="controls">
        <Switch
          legend="phase"
          values={named(page.phases)}
          chosen={choice.phase}
          onChoose={(phase) => change({ phase })}
        />
        <Switch
          legend="execution"
          values={named(page.executions)}
          chosen={choice.execution}
          onChoose={(execution) => change({ execution })}
        />
        <Switch
          legend="chip"
          values={page.chips.map((c, i) => ({ value: String(i), label: c.name, title: c.title }))}
          chosen={String(choice.chip)}
          onChoose={(place) => change({ chip: Number(place) })}
        />
        <label class="search">
          ${" "}
          <input
            type="number"
            min="0"
            step="any"
            value={choice.price}
            placeholder="a chip-hour"
            onInput={(event) => change({ price: event.currentTarget.value })}
          />
        </label>
      </div>
      <div class="picture">
        <Verdict step={step} on={on} chip={chip} groups={groups} price={choice.price} />
        <Roofline
          chip={chip}
          others={others}
          groups={inside}
          total={on.seconds}
          onPick={(group) => setPicked(group.id)}
        />
      </div>
      {on.busy + on.waiting > 1.005 * on.seconds ? (
        <p class="key">
          Exchanges run beside computing: kernels take {seconds(on.busy)} together, the step{" "}
          {seconds(on.seconds)}. Shares are of the step, so that they may add up to more.
        </p>
      ) : null}

      <h3 id="where">Where it goes</h3>
      <div class="controls">
        <Switch
          legend="by"
          values={named(METRICS)}
          chosen={choice.metric}
          onChoose={(metric) => change({ metric: metric as Choice["metric"] })}
        />
        <label class="search">
          search{" "}
          <input
            type="search"
            value={choice.search}
            placeholder="module, kernel, family"
            onInput={(event) => change({ search: event.currentTarget.value })}
          />
        </label>
      </div>
      <Icicle
        title={page.title}
        groups={groups}
        modules={page.modules[choice.phase] ?? {}}
        memory={memory}
        metric={choice.metric}
        module={choice.module}
        search={choice.search}
        onZoom={(module) => change({ module })}
      />

      <h3 id="kernels">Kernels{choice.module ? ` of ${choice.module}` : ""}</h3>
      <Kernels groups={inside} total={on.seconds} search={choice.search} picked={picked} onPick={setPicked} />

      {memory?.time.length ? (
        <>
          <h3 id="memory-over-the-step">Memory over the step</h3>
          <MemoryOver memory={memory} texts={page.texts} chip={chip} execution={page.main} />
        </>
      ) : null}
    </>
  );
}
