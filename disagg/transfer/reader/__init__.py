"""The reader of leases: requests, offers, READs and the commit that makes their bytes valid."""
