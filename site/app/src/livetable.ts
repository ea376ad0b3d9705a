// Sliders and choices over a table whose first columns say where a row lies: the row that is chosen
// stands above the table, each number under the head of its column.  Where no row has all that is
// chosen, the nearest one with what was moved last is shown, and a sentence says what moved along.

interface Axis {
  name: string;
  values: string[]; // of numbers, in their order
  places: number[]; // by row: a place in `values`
  ordered: boolean; // numbers: a slider
  chosen: number; // a place in `values`
  show: () => void; // in the control
}

const textOf = (cell: Element | undefined): string => (cell?.textContent ?? "").trim();

/** Offer the choices of a table; nothing where its rows differ along no axis. */
export function offerChoices(table: HTMLTableElement): void {
  const heads = [...(table.tHead?.rows[0]?.cells ?? [])].map(textOf);
  const rows = [...(table.tBodies[0]?.rows ?? [])];
  const count = Number(table.dataset.axes);
  const axes = heads
    .slice(0, count)
    .map((name, column) => axisOf(name, rows.map((row) => row.cells[column])))
    .filter(({ values }) => values.length > 1);
  if (!axes.length) return;
  const place = document.createElement("div");
  place.className = "verdict live";
  const controls = document.createElement("div");
  controls.className = "controls";
  const told = document.createElement("p");
  told.setAttribute("aria-live", "polite");
  const facts = document.createElement("dl");
  facts.setAttribute("aria-live", "polite");
  const choose = (moved?: Axis): void => {
    const wanted = axes.map(({ name, values, chosen }) => `${name} ${values[chosen]}`);
    const picked = nearest(axes, rows.length, moved);
    const others = axes.filter((axis) => axis.places[picked] !== axis.chosen);
    for (const axis of others) axis.chosen = axis.places[picked] ?? 0;
    for (const axis of axes) axis.show();
    const instead = others.map(({ name, values, chosen }) => `${name} ${values[chosen]}`);
    told.textContent =
      moved && others.length ? `No line has ${wanted.join(", ")}: the nearest has ${instead.join(", ")}.` : "";
    rows.forEach((row, i) => row.classList.toggle("picked", i === picked));
    facts.replaceChildren(
      ...heads.slice(count).map((head, i) => {
        const fact = document.createElement("div");
        fact.className = "fact";
        const [name, value] = [document.createElement("dt"), document.createElement("dd")];
        name.textContent = head;
        value.textContent = textOf(rows[picked]?.cells[count + i]);
        fact.append(name, value);
        return fact;
      }),
    );
  };
  controls.append(...axes.map((axis) => choiceOf(axis, () => choose(axis))));
  place.append(controls, told, facts);
  table.parentElement?.before(place);
  choose();
}

/** What a column's cells hold: where all are numbers, in their order. */
function axisOf(name: string, cells: (HTMLTableCellElement | undefined)[]): Axis {
  const numbers = new Map(cells.map((cell) => [textOf(cell), Number(cell?.dataset.value)]));
  const ordered = [...numbers.values()].every(Number.isFinite);
  const values = [...numbers.keys()];
  if (ordered) values.sort((a, b) => (numbers.get(a) ?? 0) - (numbers.get(b) ?? 0));
  const places = cells.map((cell) => values.indexOf(textOf(cell)));
  return { name, values, places, ordered, chosen: 0, show: () => {} };
}

/** The row that is the fewest steps from what is chosen, of those where `moved` is as chosen. */
function nearest(axes: Axis[], rows: number, moved?: Axis): number {
  const steps = (row: number): number =>
    axes.reduce((sum, axis) => {
      const far = Math.abs((axis.places[row] ?? 0) - axis.chosen);
      // Another chip is further away than any other size.
      return sum + (axis === moved && far ? Infinity : axis.ordered || !far ? far : rows);
    }, 0);
  let best = 0;
  for (let row = 1; row < rows; row++) if (steps(row) < steps(best)) best = row;
  return best;
}

/** A slider over numbers; a list of other values. */
function choiceOf(axis: Axis, choose: () => void): Element {
  const label = document.createElement("label");
  const input = document.createElement(axis.ordered ? "input" : "select");
  const said = document.createElement("output");
  label.className = "cursor";
  label.append(`${axis.name} `, input, said);
  if (input instanceof HTMLInputElement) {
    Object.assign(input, { type: "range", min: "0", max: String(axis.values.length - 1) });
  } else {
    input.append(...axis.values.map((text, i) => new Option(text, String(i))));
  }
  axis.show = () => {
    input.value = String(axis.chosen);
    if (axis.ordered) said.textContent = axis.values[axis.chosen] ?? "";
  };
  input.addEventListener("input", () => {
    axis.chosen = Number(input.value);
    choose();
  });
  return label;
}
