// Numbers, times and sizes as people read them.

export function integer(value) {
  return value === null || value === undefined ? "" : Math.round(value).toLocaleString("en-US");
}

/** Four significant digits. */
export function number(value) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return size >= 1e4 ? integer(value) : String(Number(value.toPrecision(4)));
}

export function bytes(value) {
  if (value === null || value === undefined) return "";
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return `${value} B`;
}

export function duration(seconds) {
  if (seconds < 0) return "0 s";
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.floor(seconds / 86400)} days`;
}

/** A time of the server, in seconds or ISO 8601, as local date and time. */
export function moment(value) {
  if (value === null || value === undefined) return "";
  const date = new Date(typeof value === "number" ? value * 1000 : value);
  const two = (part) => String(part).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

/** `owner` of `tml:organization_user:owner`. */
export function owner(urn) {
  return String(urn ?? "").split(":").at(-1);
}

/** The base model of a checkpoint or run, and in how many bits it was if that was not dense. */
export function baseOf(one) {
  return one.base_precision ? `${one.base_model} (${one.base_precision})` : one.base_model;
}
