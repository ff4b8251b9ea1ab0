// A plan's page: copies the recipe, and shows whom a rank talks to.
"use strict";
document.addEventListener("click", async (event) => {
  const button = event.target.closest?.(".copy");
  if (!button) return;
  const text = button.parentElement.querySelector("pre").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // a page in a file, or one without the permission: the text is selected instead
    getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
});

const AXES_OF_RANKS = ["pp", "dpReplicate", "dpShard", "cp", "tp"]; // outermost first
const PEER_COLOURS = { pp: 6, dpReplicate: 3, dpShard: 0, cp: 2, tp: 1 };
function place(rank, degrees) {
  const found = {};
  for (const axis of [...AXES_OF_RANKS].reverse()) {
    found[axis] = rank % degrees[axis];
    rank = Math.floor(rank / degrees[axis]);
  }
  return found;
}
function point(machines, rank) {
  const degrees = Object.fromEntries(AXES_OF_RANKS.map((axis) => [axis, +machines.dataset[axis]]));
  const self = place(rank, degrees);
  machines.classList.add("pointed");
  for (const cell of machines.querySelectorAll("[data-rank]")) {
    const other = place(+cell.dataset.rank, degrees);
    const differ = AXES_OF_RANKS.filter((axis) => self[axis] !== other[axis]);
    cell.classList.toggle("self", differ.length === 0);
    cell.classList.toggle("peer", differ.length === 1);
    if (differ.length === 1) cell.style.setProperty("--peer", `var(--c${PEER_COLOURS[differ[0]]})`);
  }
  return AXES_OF_RANKS.filter((axis) => degrees[axis] > 1).map((axis) => `${axis.replace(/[A-Z]/, (l) => `_${l.toLowerCase()}`)} ${self[axis]}`);
}
for (const kind of ["pointerover", "pointerdown"])
  document.addEventListener(kind, (event) => {
    const cell = event.target.closest?.("[data-rank]"),
      machines = cell?.closest(".machines");
    for (const one of document.querySelectorAll(".machines.pointed")) if (one !== machines) one.classList.remove("pointed");
    if (!cell) {
      for (const one of document.querySelectorAll(".machines .self, .machines .peer")) one.classList.remove("self", "peer");
      return;
    }
    const words = point(machines, +cell.dataset.rank);
    cell.dataset.tip = `rank ${cell.dataset.rank}\n${words.join(", ") || "alone"}`;
  });
