"""Reports: rows of replays become tables and figures; a decode step becomes a page to click through.

A researcher's pictures. Knows rows as they are written, and how to draw; runs no replay and knows no model. `rows`
reads, `commands` says how rows were made, `svg` draws, `figures` says what is drawn, `pages` puts it on a page;
`moments` and `explainer` are the page about one step.
"""
