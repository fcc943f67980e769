// The program of a page of its own: its traces stand in the page, its view in the address.

/** Shows the runs of a page. */
async function start() {
  const root = document.querySelector(".ringsim");
  try {
    const packed = [...document.querySelectorAll('script[type="application/x-ringsim"]')];
    const runs = await Promise.all(packed.map(async (one) => readRun(await unpack(fromBase64(one.textContent.trim())))));
    root.classList.add("ready");
    const prefers = matchMedia("(prefers-color-scheme: dark)");
    window.ringsim = new View(root, runs).open(prefers.matches);
    prefers.addEventListener("change", (event) => window.ringsim.setTheme(event.matches));
  } catch (error) {
    root.querySelector('[data-part="live"]').textContent = `The view cannot be shown: ${error.message}`;
    root.classList.add("failed");
    throw error;
  }
}

start();
