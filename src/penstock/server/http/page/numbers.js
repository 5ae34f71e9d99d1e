// Numbers as they are read.

export function number(value) {
  return value.toLocaleString("en", value >= 100 || Number.isInteger(value) ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 });
}

/** Write a count with its noun. */
export const counted = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

function scaled(value, step, units) {
  let at = 0;
  while (Math.abs(value) >= step && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  const digits = at === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[at]}`;
}

/** Memory in binary units, rates in decimal ones, as everywhere in penstock. */
export const size = (bytes) => scaled(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
export const speed = (rate) => scaled(rate, 1000, ["B/s", "KB/s", "MB/s", "GB/s", "TB/s"]);
export const share = (part) => `${(part * 100).toFixed(0)}%`;

/** Minutes and seconds; hours, where there are some. */
export function duration(seconds) {
  const whole = Math.round(seconds), two = (count) => String(count).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** Seconds of a thing that has been. */
export const took = (seconds) => (seconds < 60 ? `${number(seconds < 10 ? Math.round(seconds * 10) / 10 : Math.round(seconds))} s` : duration(seconds));
