"""Who prefills and who decodes: one file per rule, chosen by `router.policy`."""
