// The border between the table and the episode. The mouse and the arrow keys move it.

const LEAST = 25, // percent of the window
  MOST = 80;

function makePane() {
  const split = at("split");
  split.addEventListener("pointerdown", event => split.setPointerCapture(event.pointerId));
  split.addEventListener("pointermove", event => {
    if (split.hasPointerCapture(event.pointerId)) setPane((100 * event.clientX) / innerWidth);
  });
  split.addEventListener("keydown", event => {
    const now = Number(split.getAttribute("aria-valuenow"));
    const wanted = { ArrowLeft: now - 3, ArrowRight: now + 3, Home: LEAST, End: MOST }[event.key];
    if (wanted === undefined) return;
    event.preventDefault();
    setPane(wanted);
  });
  setPane(innerWidth < 1400 ? 46 : 50);
}

function setPane(wanted) {
  const share = Math.round(Math.max(LEAST, Math.min(MOST, wanted)));
  at("split").setAttribute("aria-valuenow", share);
  document.querySelector("main").style.setProperty("--list", share + "%");
}

// Draw the table in its new size.
function fitTable() {
  chooseColumns();
  layRows();
}
