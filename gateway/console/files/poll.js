// Repeats a look at the gateway while a person can see it. A hidden tab asks nothing.
//
// A look that takes long is repeated less often: one page takes at most a tenth of the time of the worker it asks.

const SHARE = 9;

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
      report({ at: Date.now() });
    } catch (error) {
      if (!signal.aborted) {
        report({ error });
      }
    }
    running = false;
    if (!signal.aborted) {
      timer = setTimeout(run, Math.max(everyMs, SHARE * (performance.now() - began)));
    }
  }

  document.addEventListener("visibilitychange", run, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  run();
  return run;
}
