for (const root of document.querySelectorAll("[data-panel]")) panels[root.dataset.panel](root);
