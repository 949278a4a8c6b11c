"use strict";

/* Axes: from values to pixels, where ticks stand, and how numbers read. */

/* Whole numbers below a million are not rounded: 1,024 tokens stay 1,024. */
function trimmed(value, digits) {
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  return value.toLocaleString("en", { maximumSignificantDigits: digits, useGrouping: true });
}

/* A number with its unit, in the size that reads best. */
function formatted(value, unit, digits = 3) {
  if (unit === "ms" && value >= 1000) return `${trimmed(value / 1000, digits)} s`;
  if (unit === "bytes") {
    const names = ["B", "KiB", "MiB", "GiB", "TiB"];
    const step = Math.max(0, Math.min(4, Math.floor(Math.log2(value) / 10 + 1e-9)));
    return `${trimmed(value / 1024 ** step, digits)} ${names[step]}`;
  }
  if (unit === "FLOPs") {
    const names = ["", "k", "M", "G", "T", "P"];
    const step = Math.max(0, Math.min(5, Math.floor(Math.log10(value) / 3 + 1e-9)));
    return `${trimmed(value / 1000 ** step, digits)} ${names[step]}FLOPs`;
  }
  return unit ? `${trimmed(value, digits)} ${unit}` : trimmed(value, digits);
}

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

/* 1, 2, 5 of every power of ten while there is room, otherwise whole powers; powers of two for bytes. */
function logTicks(low, high, unit, count) {
  const ladders = unit === "bytes"
    ? [[2, [1]], [4, [1]], [16, [1]], [64, [1]]]
    : [[10, [1, 2, 5]], [10, [1, 3]], [10, [1]], [100, [1]], [1000, [1]]];
  let ticks = [];
  for (const [base, factors] of ladders) {
    ticks = [];
    for (let power = Math.floor(Math.log(low) / Math.log(base)); base ** power <= high * 1.0001; power++) {
      for (const factor of factors) {
        const tick = factor * base ** power;
        if (tick >= low * 0.9999 && tick <= high * 1.0001) ticks.push(tick);
      }
    }
    if (ticks.length <= count) return ticks;
  }
  return ticks;
}

/* values: what must be visible; options: {unit, log, ticks: wished ones}. Returns {at: value -> pixel, ticks}. */
function scale(values, from, to, options, count) {
  let low = Math.min(...values, ...(options.from_zero ? [0] : []));
  let high = Math.max(...values);
  const log = options.log && low > 0;
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 1, high + 1];
  const forth = log ? Math.log : (value) => value;
  const back = log ? Math.exp : (value) => value;
  const margin = (forth(high) - forth(low)) * 0.05;
  const bottom = forth(low) - (options.from_zero ? 0 : margin);
  const top = forth(high) + margin;
  const at = (value) => from + ((forth(value) - bottom) / (top - bottom)) * (to - from);
  const ends = [back(bottom), back(top)];
  let ticks = options.ticks;
  if (!ticks) ticks = log ? logTicks(...ends, options.unit, count) : linearTicks(...ends, count);
  if (ticks.length < 2) ticks = linearTicks(...ends, count);
  return { at, ticks };
}
