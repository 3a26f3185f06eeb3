package policy

import "time"

const (
	sglangTreeTokens = 67_108_864 / 4 // of one backend
	sglangTreeWalk   = 120 * time.Second
)

// sglangTree is the radix tree of sglang-router, vllm-router and SMG. Now and
// then it is walked, and cut back where it has grown too large.
type sglangTree struct {
	ledger
	walked time.Time
}

func newSGLangTree(most int) *sglangTree {
	return &sglangTree{ledger: *newLedger(most, losesTails)}
}

// add records where a prompt was sent, and walks the tree when that is due.
func (t *sglangTree) add(slot int, r *Request) {
	t.ledger.add(slot, r.Blocks, r.Now)
	if t.walked.IsZero() {
		t.walked = r.Now
	}
	if r.Now.Sub(t.walked) >= sglangTreeWalk {
		t.walked = r.Now
		t.shrink(r.blocksIn(sglangTreeTokens))
	}
}
