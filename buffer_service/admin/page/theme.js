// Light or dark, before anything is drawn. A classic script in the head: a module would run after the first paint.
// "system" follows prefers-color-scheme; the choice is kept for this browser.
"use strict";

const THEMES = ["system", "light", "dark"];
const THEME_KEY = "rollout-buffer theme";

function themeChosen() {
  try {
    const kept = localStorage.getItem(THEME_KEY);
    return THEMES.includes(kept) ? kept : "system";
  } catch {
    return "system"; // A browser that keeps nothing.
  }
}

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const button = document.getElementById("theme");
  if (button !== null) {
    button.textContent = `Theme: ${theme}`;
  }
}

showTheme(themeChosen());

document.addEventListener("DOMContentLoaded", () => {
  showTheme(themeChosen());
  document.getElementById("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    try {
      localStorage.setItem(THEME_KEY, next);
    } catch {
      // It holds until the page is left.
    }
    showTheme(next);
  });
});
