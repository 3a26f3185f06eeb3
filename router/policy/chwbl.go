package policy

// chwbl is KubeAI's PrefixHash: consistent hashing with bounded loads. The key
// is the beginning of the first user message; from its place on the ring
// clockwise, the first backend takes it whose requests in flight are at most
// loadFactor times what the mean will be with this one.
type chwbl struct {
	loadFactor float64
	ring       ring
}

func newCHWBL(o options) Policy { return &chwbl{loadFactor: or(o.LoadFactor, 1.25)} }

func (p *chwbl) Choose(r *Request, candidates []Candidate) int {
	total := 0.0
	for i := range candidates {
		total += candidates[i].Requests
	}
	accepted := (total + 1) / float64(len(candidates)) * p.loadFactor
	r.tell("its place on a hash ring, behind that of the prompt's beginning, of those not too busy", false, 0, nil)
	first := -1
	for i := range p.ring.clockwise(rendezvous(r.head(), 0), candidates) {
		if first < 0 {
			first = i
		}
		if total == 0 || candidates[i].Requests <= accepted {
			return i
		}
	}
	return first
}

// head is what stands for the beginning of the prompt: Head, else the first
// block; 0 when there is neither.
func (r *Request) head() uint64 {
	if r.PromptKey != 0 {
		return r.PromptKey
	}
	return r.FirstBlock()
}
