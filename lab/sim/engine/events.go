package engine

// KVEvent is a change of what the KV cache or the host tier holds.
type KVEvent struct {
	Kind KVEventKind
	Host bool // in the host tier; false: in the KV cache
	// NotKept is how many further blocks of the stored span the group does not keep.
	NotKept int32
	Group   *Group // that the change is in; nil: the model has one

	// Hashes are the blocks that were stored, each the child of the one before, or the
	// one block that was removed. A block that was stored twice is removed twice. They must
	// not be modified.
	Hashes []BlockHash

	// Of blocks that were stored in the KV cache:
	Parent  BlockHash // of the first block; 0: it begins the sequence
	Request *Request  // its Blocks from First on are Hashes and those not kept
	First   int
}

// KVEventKind is the kind of a KVEvent.
type KVEventKind uint8

const (
	BlocksStored KVEventKind = iota
	BlockRemoved             // evicted
	CacheCleared             // all blocks of the KV cache are gone; the host tier stays
)

// eventLog collects the events of a block pool. A nil *eventLog collects nothing.
type eventLog struct {
	host   bool
	events []KVEvent
}

// addStored records that blocks of r are in the KV cache of full attention now, from index first up to end. group is nil
// if it is the only one.
func (l *eventLog) addStored(r *Request, first, end int, group *Group) {
	if first < end {
		l.addKept(r, first, end, r.Blocks[first:end:end], group)
	}
}

// addKept records which of the blocks of r from index first up to end a group keeps.
func (l *eventLog) addKept(r *Request, first, end int, kept []BlockHash, group *Group) {
	if l == nil {
		return
	}
	event := KVEvent{Kind: BlocksStored, Group: group, Hashes: kept, Request: r, First: first, NotKept: int32(end - first - len(kept))}
	if first > 0 {
		event.Parent = r.Blocks[first-1]
	}
	l.events = append(l.events, event)
}

// addStoredOnHost records that the host tier has block h now.
func (l *eventLog) addStoredOnHost(h BlockHash) {
	if l != nil {
		l.events = append(l.events, KVEvent{Kind: BlocksStored, Host: true, Hashes: []BlockHash{h}})
	}
}

func (l *eventLog) addRemoved(h BlockHash, group *Group) {
	if l != nil {
		l.events = append(l.events, KVEvent{Kind: BlockRemoved, Host: l.host, Group: group, Hashes: []BlockHash{h}})
	}
}

// addCleared records that the cache was cleared, once for several times in a row: without a
// step nobody takes the events.
func (l *eventLog) addCleared() {
	if l == nil {
		return
	}
	if n := len(l.events); n == 0 || l.events[n-1].Kind != CacheCleared {
		l.events = append(l.events, KVEvent{Kind: CacheCleared})
	}
}

// take returns the events since the last call.
func (l *eventLog) take() []KVEvent {
	if l == nil {
		return nil
	}
	events := l.events
	l.events = nil
	return events
}

// recordEvents makes the pool and its host tier collect events.
func (p *blockPool) recordEvents() {
	p.log = &eventLog{}
	if p.host != nil {
		p.host.log = &eventLog{host: true}
	}
}

// takeEvents returns the events since the last call: those of the KV cache, then those of the
// host tier, as in vLLM.
func (p *blockPool) takeEvents() []KVEvent {
	events := p.log.take()
	if p.host != nil {
		events = append(events, p.host.log.take()...)
	}
	return events
}
