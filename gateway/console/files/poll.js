// Repeats a look at the gateway while a person can see it. A hidden tab asks nothing.
//
// A look that takes long is repeated less often: it waits nine times as long as it took, at most a quarter of a minute.

const PAUSES = 9;
const LONGEST_MS = 15_000;

export function poll(work, everyMs, signal, report) {
  let timer = 0;
  let running = false;

  async function run() {
    clearTimeout(timer);
    if (running || signal.aborted || document.hidden) {
      return;
    }
    running = true;
    const began = performance.now();
    try {
      await work();
      if (!signal.aborted) {
        report({ at: Date.now() });
      }
    } catch (error) {
      if (!signal.aborted) {
        report({ error });
      }
    }
    running = false;
    if (!signal.aborted) {
      timer = setTimeout(run, Math.max(everyMs, Math.min(LONGEST_MS, PAUSES * (performance.now() - began))));
    }
  }

  document.addEventListener("visibilitychange", run, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  run();
  return run;
}
