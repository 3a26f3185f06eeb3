package kvevents

// ParseSources reads a replica's answer to GET /kv_event_sources: the publishers of KV cache
// events by data-parallel rank, without those that are off. host is the replica's: it replaces
// addresses that mean any interface.
func ParseSources(body []byte, host string) ([]Source, error) {
	return nil, nil
}

// ConfiguredSources returns the sources of ranks data-parallel ranks, where endpoint and replay
// (or "") are those of rank 0, and each next rank has the next port, as vLLM counts them.
// host replaces addresses that mean any interface.
func ConfiguredSources(endpoint, replay, topic, host string, ranks int) ([]Source, error) {
	return nil, nil
}
