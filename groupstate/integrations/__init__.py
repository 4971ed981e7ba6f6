"""groupstate beside other systems, each imported only on demand and with an extra of its own."""
