package policy

import "warmroute/router/prompt"

// Bounds of EPP's table, in tokens: its blocks have 64.
const (
	eppTableTokens  = 31_250 * 64 // of one backend, where the size of its cache is unknown
	eppPromptTokens = 2_048 * 64  // of a prompt that are looked at
)

// eppTable is what the endpoint picker of the Gateway API and of llm-d reckons
// each backend to hold. A block counts whether or not those before it are held:
// the table evicts the heads of prefixes first, and credits what is left. What
// was once inserted is never corrected.
type eppTable struct{ ledger *ledger }

func newEPPTable(most int) eppTable { return eppTable{newLedger(most, losesHeads)} }

// matched is the share of the prompt that each candidate is credited with.
// Valid until the next call.
func (t eppTable) matched(r *Request, candidates []Candidate) func(i int) float64 {
	blocks := t.seen(r)
	counts := t.ledger.scattered(blocks, candidates)
	return func(i int) float64 {
		if len(blocks) == 0 {
			return 0
		}
		return float64(counts[i]) / float64(len(blocks))
	}
}

// placed notes that a candidate was sent the prompt.
func (t eppTable) placed(r *Request, c *Candidate) {
	tokens := c.CacheTokens
	if tokens <= 0 {
		tokens = eppTableTokens
	}
	t.ledger.limit(c.Slot, r.blocksIn(tokens))
	t.ledger.add(c.Slot, t.seen(r), r.Now)
}

func (t eppTable) seen(r *Request) []prompt.Block {
	return r.Blocks[:min(len(r.Blocks), r.blocksIn(eppPromptTokens))]
}
