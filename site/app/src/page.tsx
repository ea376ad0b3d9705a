// What runs when a page of rooftrace is opened.

import { render } from "preact";
import { contentsOfPage } from "./contents.ts";
import { Explorer } from "./explorer.tsx";
import { enliven } from "./statictables.ts";

const THEMES = ["as the system", "light", "dark"] as const;

function offerThemes(): void {
  const place = document.getElementById("theme");
  if (!place) return;
  let chosen = 0;
  const button = document.createElement("button");
  button.type = "button";
  const show = () => {
    document.documentElement.style.colorScheme = ["light dark", "light", "dark"][chosen] ?? "";
    button.textContent = `colours: ${THEMES[chosen]}`;
  };
  button.addEventListener("click", () => {
    chosen = (chosen + 1) % THEMES.length;
    show();
  });
  show();
  place.append(button);
}

enliven(document);
offerThemes();
const page = contentsOfPage();
const place = document.getElementById("explorer");
if (page && place) render(<Explorer page={page} />, place);
document.documentElement.dataset.ready = "true";
