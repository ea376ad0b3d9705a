// Tables that were written with the page: sorted by a click on a head, filtered where they are long.

import { offerChoices } from "./livetable.ts";

const LONG = 12; // rows

function valueOf(row: HTMLTableRowElement, column: number): number | string {
  const cell = row.cells[column];
  const raw = cell?.dataset.value;
  return raw === undefined ? (cell?.textContent ?? "").trim() : Number(raw);
}

function sortBy(table: HTMLTableElement, column: number, up: boolean): void {
  const body = table.tBodies[0];
  if (!body) return;
  const rows = [...body.rows].map((row) => ({ row, value: valueOf(row, column) }));
  rows.sort((a, b) => {
    const [x, y] = [a.value, b.value];
    // Blank cells and words stay below numbers, however the numbers are sorted.
    if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
    const order = typeof x === "number" ? x - Number(y) : x.localeCompare(String(y));
    return up ? order : -order;
  });
  body.append(...rows.map(({ row }) => row));
}

function makeSortable(table: HTMLTableElement): void {
  const heads = [...(table.tHead?.rows[0]?.cells ?? [])];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const number = head.classList.contains("number");
      const now = head.getAttribute("aria-sort");
      const up = now === "none" ? !number : now === "descending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      sortBy(table, column, up);
    });
  });
}

function makeFiltered(table: HTMLTableElement): void {
  const label = document.createElement("label");
  label.className = "search";
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "part of a row";
  label.append("filter ", input);
  input.addEventListener("input", () => {
    const asked = input.value.trim().toLowerCase();
    for (const row of table.tBodies[0]?.rows ?? []) {
      row.hidden = asked !== "" && !(row.textContent ?? "").toLowerCase().includes(asked);
    }
  });
  table.parentElement?.before(label);
}

export function enliven(root: ParentNode): void {
  for (const table of root.querySelectorAll<HTMLTableElement>(".table > table")) {
    const rows = table.tBodies[0]?.rows.length ?? 0;
    if (rows > 1) makeSortable(table);
    if (rows > 1 && table.dataset.axes) offerChoices(table);
    if (rows > LONG) makeFiltered(table);
  }
}
