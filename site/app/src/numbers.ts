// How numbers are written: the same words as in the other outputs of rooftrace.

const LARGE = ["", "k", "M", "G", "T", "P", "E"];
const COUNTS = ["", " K", " M", " B", " T", " P", " E"];
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export const MISSING = "–";

export function digits(value: number): string {
  if (value >= 1000) return Math.round(value).toLocaleString("en-US");
  return value >= 10 || value === 0 ? value.toFixed(value === 0 ? 0 : 1) : value.toFixed(2);
}

function scaled(value: number, base: number, units: readonly string[]): string {
  let place = 0;
  let rest = Math.abs(value);
  // 999.96 would be written as 1000.0: the next unit says it shorter.
  while (rest >= base * 0.99995 && place < units.length - 1) {
    rest /= base;
    place += 1;
  }
  const text = place === 0 && Number.isInteger(rest) ? String(rest) : digits(rest);
  return `${value < 0 ? "-" : ""}${text}${units[place]}`;
}

const prefixed = (unit: string): string[] => LARGE.map((prefix) => ` ${prefix}${unit}`);
const FLOP = prefixed("FLOP");
const BYTE = prefixed("B");
const RATE = prefixed("FLOP/s");
const SECOND = [" ns", " us", " ms", " s"];

export const flop = (value: number): string => scaled(value, 1000, FLOP);
export const bytes = (value: number): string => scaled(value, 1000, BYTE);
export const rate = (value: number): string => scaled(value, 1000, RATE);
export const count = (value: number): string => scaled(value, 1000, COUNTS);
export const whole = (value: number): string => Math.round(value).toLocaleString("en-US");
export const seconds = (value: number): string =>
  value === 0 ? "0 s" : scaled(value * 1e9, 1000, SECOND);
export const capacity = (value: number): string =>
  scaled(value, 1024, BINARY.map((unit) => ` ${unit}`));
export const intensity = (value: number): string =>
  !Number.isFinite(value) ? MISSING : value > 0 && value < 0.1 ? value.toPrecision(3) : digits(value);

/** A power of ten on an axis: "1", "100 T", in the unit of the axis. */
export function decade(value: number): string {
  const power = Math.round(Math.log10(value));
  if (Math.abs(Math.log10(value) - power) > 1e-6) return "";
  if (power < 0) return (10 ** power).toFixed(-power);
  return `${10 ** (power % 3)}${COUNTS[Math.floor(power / 3)]?.replace("B", "G") ?? ""}`;
}

export const plural = (number: number, noun: string): string =>
  `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Round numbers of binary units between 0 and the most, about so many. */
export function binaryTicks(most: number, about: number): number[] {
  let step = 1;
  while (step * about < most) step *= 2;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

export function share(value: number | null): string {
  if (value === null || !Number.isFinite(value)) return MISSING;
  if (value > 0 && value < 0.0001) return "<0.01 %";
  return `${(value * 100).toFixed(value < 0.01 ? 2 : 1)} %`;
}
