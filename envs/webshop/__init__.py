"""The WebShop environment: search a shop, choose a product and its options, buy it."""
