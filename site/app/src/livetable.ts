// Sliders and choices over a table whose first columns say where a row lies: the row that is chosen
// stands above the table, each number under the head of its column.

interface Axis {
  column: number;
  values: string[];
  chosen: number; // a place in `values`
}

const textOf = (cell: Element | undefined): string => (cell?.textContent ?? "").trim();

/** Offer the choices of a table; nothing where its rows differ along no axis. */
export function offerChoices(table: HTMLTableElement): void {
  const heads = [...(table.tHead?.rows[0]?.cells ?? [])].map(textOf);
  const rows = [...(table.tBodies[0]?.rows ?? [])];
  const count = Number(table.dataset.axes);
  const axes: Axis[] = heads
    .slice(0, count)
    .map((_, column) => ({
      column,
      values: [...new Set(rows.map((row) => textOf(row.cells[column])))],
      chosen: 0,
    }))
    .filter(({ values }) => values.length > 1);
  if (!axes.length) return;
  const place = document.createElement("div");
  place.className = "verdict live";
  const controls = document.createElement("div");
  controls.className = "controls";
  const facts = document.createElement("dl");
  facts.setAttribute("aria-live", "polite");
  const show = (): void => {
    const row = rows.find((each) =>
      axes.every(({ column, values, chosen }) => textOf(each.cells[column]) === values[chosen]),
    );
    for (const each of rows) each.classList.toggle("picked", each === row);
    facts.replaceChildren(
      ...heads.slice(count).map((head, i) => {
        const fact = document.createElement("div");
        fact.className = "fact";
        const [name, value] = [document.createElement("dt"), document.createElement("dd")];
        name.textContent = head;
        value.textContent = row ? textOf(row.cells[count + i]) : "–";
        fact.append(name, value);
        return fact;
      }),
    );
  };
  controls.append(...axes.map((axis) => choiceOf(axis, heads[axis.column] ?? "", rows, show)));
  place.append(controls, facts);
  table.parentElement?.before(place);
  show();
}

/** A slider over numbers, in their order; a list of other values. */
function choiceOf(axis: Axis, name: string, rows: HTMLTableRowElement[], show: () => void): Element {
  const label = document.createElement("label");
  const value = (text: string): number =>
    Number(rows.find((row) => textOf(row.cells[axis.column]) === text)?.cells[axis.column]?.dataset.value);
  const numbers = axis.values.every((text) => Number.isFinite(value(text)));
  if (numbers) axis.values.sort((a, b) => value(a) - value(b));
  const input = document.createElement(numbers ? "input" : "select");
  const said = document.createElement("output");
  label.className = "cursor";
  label.append(`${name} `, input, said);
  if (input instanceof HTMLInputElement) {
    Object.assign(input, { type: "range", min: "0", max: String(axis.values.length - 1), value: "0" });
  } else {
    input.append(...axis.values.map((text, i) => new Option(text, String(i))));
  }
  const choose = (): void => {
    axis.chosen = Number(input.value);
    if (numbers) said.textContent = axis.values[axis.chosen] ?? "";
    show();
  };
  input.addEventListener("input", choose);
  if (numbers) said.textContent = axis.values[0] ?? "";
  return label;
}
