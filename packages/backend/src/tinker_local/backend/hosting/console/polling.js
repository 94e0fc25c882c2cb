// Asks again and again, as long as somebody looks at the page.

const LONGEST_MS = 10000;

/**
 * Calls `ask` at once and then `everyMs` after each answer; not while the tab is hidden. `failed` is given each failure,
 * and null when the next answer is there. After failures it waits longer.
 */
export class Poll {
  constructor(ask, everyMs, failed) {
    this.ask = ask;
    this.everyMs = everyMs;
    this.failed = failed;
    this.stopped = true;
    this.timer = null;
    this.running = false;
    this.again = false;
    this.failures = 0;
    this.seen = () => {
      if (!document.hidden) this.now();
    };
  }

  start() {
    this.stopped = false;
    document.addEventListener("visibilitychange", this.seen);
    this.now();
    return this;
  }

  stop() {
    this.stopped = true;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.seen);
  }

  async now() {
    clearTimeout(this.timer);
    if (this.stopped) return;
    if (this.running) {
      this.again = true;
      return;
    }
    this.running = true;
    do {
      this.again = false;
      try {
        await this.ask();
        if (this.failures && !this.stopped) this.failed(null);
        this.failures = 0;
      } catch (error) {
        this.failures += 1;
        if (!this.stopped) this.failed(error);
      }
    } while (this.again && !this.stopped);
    this.running = false;
    if (this.stopped || document.hidden) return;
    this.timer = setTimeout(() => this.now(), Math.min(LONGEST_MS, this.everyMs * 2 ** Math.min(this.failures, 3)));
  }
}
