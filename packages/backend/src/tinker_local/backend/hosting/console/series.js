// A curve of a run as numbers: one series for each metric.

/** Points in order. `step`: of the optimizer or the program; `time`: in seconds since 1970. */
export class Series {
  constructor() {
    this.step = [];
    this.time = [];
    this.value = [];
  }

  add(step, time, value) {
    this.step.push(step);
    this.time.push(time);
    this.value.push(value);
  }

  get length() {
    return this.value.length;
  }
}

/** Names that no program can give: a metric of a program is `logged:NAME`. */
export const BUILT_IN = new Map([
  ["loss", "loss"],
  ["gradient_norm", "gradient norm"],
  ["tokens_per_second", "trained tokens/s"],
  ["learning_rate", "learning rate"],
  ["kl", "KL(sampler, trainer), nats/token"],
  ["largest_ratio", "largest ratio, trainer to sampler"],
  ["beyond_share", "share of ratios beyond 1 ± 0.2"],
]);

/** Of a step's `mismatch`, what is drawn. */
const DISTANCES = ["kl", "largest_ratio", "beyond_share"];

/** The groups of sampled tokens in a step's `mismatch`, and what they are called. All have a series by the name of the
 * measure, the others one of `ofGroup`. */
export const GROUPS = new Map([
  ["all", "all"],
  ["text", "text"],
  ["after_image", "after an image"],
  ["turn_1", "turn 1"],
  ["turn_2", "turn 2"],
  ["turn_3", "turn 3"],
  ["turn_4_on", "turn 4 and later"],
  ["staleness_0", "newest weights"],
  ["staleness_1", "1 step old"],
  ["staleness_2", "2 steps old"],
  ["staleness_3_on", "3 steps old or more"],
  ["staleness_unknown", "of unknown age"],
]);

export function ofGroup(name, group) {
  return group === "all" ? name : `${name}:${group}`;
}

/** Whether a series is of one group, and so a line in the chart of another series. */
export function isOfGroup(name) {
  return DISTANCES.some((measure) => name.startsWith(`${measure}:`));
}

export function titleOf(name) {
  return BUILT_IN.get(name) ?? name.slice("logged:".length);
}

/** A page with more charts than this would only be slow; a program may log any number of names. */
const MOST_SERIES = 300;

/** What the server recorded of one run, or the log of a program, read in pieces. */
export class Curve {
  constructor() {
    this.file = "";
    this.version = 0;
    this.restart();
  }

  restart() {
    this.next = 0;
    this.full = false;
    this.series = new Map();
    this.last = null;
    this.step = 0;
    this.begin = null;
  }

  /** Read what is new with `fetchPiece(after, file)`; `grown` is called after each piece. A log that was written anew is
   * another file, and replaces what was read. */
  async read(fetchPiece, grown) {
    for (;;) {
      const piece = await fetchPiece(this.next, this.file);
      if ((piece.file ?? "") !== this.file) {
        if (this.series.size) {
          this.restart();
          this.version += 1;
        }
        this.file = piece.file;
      }
      for (const line of piece.lines) this.add(line);
      const more = piece.next > this.next;
      this.next = piece.next;
      this.full = piece.full;
      if (piece.lines.length) {
        this.version += 1;
        grown();
      }
      if (!more) return;
    }
  }

  add(line) {
    this.begin ??= line.time ?? null; // a log has no times
    if (line.metrics) {
      const step = line.step ?? this.step;
      if (line.time === undefined) this.step = step;
      for (const [name, value] of Object.entries(line.metrics)) this.point(`logged:${name}`, step, line.time, value);
      return;
    }
    for (const name of ["loss", "gradient_norm", "learning_rate"]) this.point(name, line.step, line.time, line[name]);
    for (const [group, found] of Object.entries(line.mismatch ?? {})) {
      for (const name of DISTANCES) this.point(ofGroup(name, group), line.step, line.time, found[name]);
    }
    const before = this.last;
    if (before && line.time > before.time && line.tokens >= before.tokens && line.step === before.step + 1) {
      const rate = (line.tokens - before.tokens) / (line.time - before.time);
      this.point("tokens_per_second", line.step, line.time, rate);
    }
    this.last = line;
    this.step = line.step;
  }

  point(name, step, time, value) {
    if (typeof value !== "number") return;
    let series = this.series.get(name);
    if (!series) {
      if (this.series.size >= MOST_SERIES) return;
      this.series.set(name, (series = new Series()));
    }
    series.add(step, time, value);
  }
}

/**
 * The points of a line that is `columns` wide: of each stretch within one column the first, lowest, highest and last.
 * `xOf(at)` is a place in columns. Returns indices in order; peaks stay visible, however many points there are.
 */
export function thinned(length, xOf, valueOf) {
  const kept = [];
  let from = 0;
  while (from < length) {
    const column = Math.floor(xOf(from));
    let low = from;
    let high = from;
    let to = from + 1;
    while (to < length && Math.floor(xOf(to)) === column) {
      if (valueOf(to) < valueOf(low)) low = to;
      if (valueOf(to) > valueOf(high)) high = to;
      to += 1;
    }
    let before = -1;
    for (const at of [from, Math.min(low, high), Math.max(low, high), to - 1]) {
      if (at > before) kept.push(at);
      before = Math.max(before, at);
    }
    from = to;
  }
  return kept;
}
