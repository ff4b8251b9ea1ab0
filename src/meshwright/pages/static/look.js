// What every page does: the switch between light and dark, and figures under the pointer.
"use strict";
const theme = {
  dark: () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark",
  changed: [], // functions to call after a change
  set(name) {
    document.documentElement.dataset.theme = name;
    this.changed.forEach((call) => call());
  },
};
try {
  const kept = localStorage.getItem("meshwright-theme");
  if (kept) document.documentElement.dataset.theme = kept;
} catch {
  /* a page within a page may store nothing */
}
document.getElementById("theme")?.addEventListener("click", () => {
  theme.set(theme.dark() ? "light" : "dark");
  try {
    localStorage.setItem("meshwright-theme", document.documentElement.dataset.theme);
  } catch {
    /* as above */
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme.changed.forEach((call) => call()));

const tip = {
  box: null,
  show(content, x, y) {
    if (!this.box) {
      this.box = document.createElement("div");
      this.box.className = "tip";
      document.body.append(this.box);
    }
    this.box.hidden = false;
    this.box.replaceChildren(content);
    const { width, height } = this.box.getBoundingClientRect();
    this.box.style.left = `${Math.max(6, x + 16 + width > innerWidth ? x - width - 16 : x + 16)}px`;
    this.box.style.top = `${Math.max(6, Math.min(innerHeight - height - 6, y + 16))}px`;
  },
  hide() {
    if (this.box) this.box.hidden = true;
  },
};
for (const kind of ["pointermove", "pointerdown"])
  document.addEventListener(kind, (event) => {
    const over = event.target.closest?.("[data-tip]");
    if (over) tip.show(over.dataset.tip, event.clientX, event.clientY);
    else if (!event.target.closest?.(".uplot")) tip.hide();
  });
