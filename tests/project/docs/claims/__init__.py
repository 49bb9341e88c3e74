"""Claims with figures: the parts of pages that are made from results, and what pages may say."""
