"""What builds the docs: pages generated from code and tests, charts, and the site's hook."""
