// A figure of Observable Plot inside of the page: as wide as its place, drawn again when that changes.

import { useEffect, useRef, useState } from "preact/hooks";

export type Drawing = (SVGSVGElement | HTMLElement) & { value?: unknown };

interface Props {
  draw: (width: number) => Drawing;
  onPoint?: (value: unknown) => void; // what lies under the pointer; null: nothing
  onPick?: (value: unknown) => void; // what was clicked
  label: string;
}

export function Figure({ draw, onPoint, onPick, label }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const fit = () => element.clientWidth && setWidth(element.clientWidth);
    fit(); // at once: an observer waits for a frame, which a page that is printed may not have
    const seen = new ResizeObserver(fit);
    seen.observe(element);
    return () => seen.disconnect();
  }, []);
  useEffect(() => {
    if (!width || !place.current) return;
    const drawing = draw(width);
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", label);
    const pointed = () => onPoint?.(drawing.value ?? null);
    const picked = () => drawing.value && onPick?.(drawing.value);
    drawing.addEventListener("input", pointed);
    drawing.addEventListener("click", picked);
    place.current.replaceChildren(drawing);
  }, [draw, width, label]);
  return <div class="figure" ref={place} />;
}
