package index

import (
	"slices"
	"testing"

	"warmroute/prompt"
)

// chainOf returns the first n blocks of a prompt with a number.
func chainOf(number, n int) (blocks []prompt.Block) {
	for i := range n {
		blocks = append(blocks, prompt.Block(number*1000+i+1))
	}
	return blocks
}

// find returns the deepest checkpoint that a backend has of a prompt, in blocks and tokens.
func find(x *Index, blocks []prompt.Block) [2]int {
	depth := []int{0}
	x.Match(blocks, depth)
	p := x.FindCheckpoint(0, blocks[:depth[0]])
	return [2]int{p.Blocks, p.Tokens}
}

func newCheckpointIndex(capacity, cost int) *Index {
	x := New(1, 1<<20)
	x.SetRequestedCapacity(0, capacity)
	x.SetCheckpointCost(0, cost)
	return x
}

func TestCheckpoints(t *testing.T) {
	x := newCheckpointIndex(1000, 10)
	long := chainOf(1, 40)
	fork := append(slices.Clone(long[:30]), chainOf(2, 10)...)
	var p Pin
	x.Add(&p, 0, long, 0)
	x.AddCheckpoint(&p, 20, 1280, true)
	x.AddCheckpoint(&p, 40, 2600, true)
	if got := [][2]int{find(x, long), find(x, fork), find(x, long[:19])}; !slices.Equal(got, [][2]int{{40, 2600}, {20, 1280}, {0, 0}}) {
		t.Errorf("checkpoints %v of the prompt, of one that leaves it, and of its beginning", got)
	}
	x.Release(&p, nil)

	var q Pin
	x.Add(&q, 0, fork, 30)
	x.RemoveCheckpoints(&q, 30, 640) // it reused less than the one after 1280
	x.AddCheckpoint(&q, 30, 1920, false)
	x.AddCheckpoint(&q, 30, 1920, true)
	x.Release(&q, nil)
	if got := [][2]int{find(x, long), find(x, fork)}; !slices.Equal(got, [][2]int{{40, 2600}, {30, 1920}}) {
		t.Errorf("checkpoints %v after a request that reused less than expected", got)
	}
	if depth, n := x.FindCheckpoint(0, long[:35]), x.CountCheckpoints(0); depth.Tokens != 1920 || !depth.Certain || n != 2 {
		t.Errorf("%+v of %d checkpoints", depth, n)
	}
	x.SetCheckpointCost(0, 0)
	if got := find(x, long); got != [2]int{} || x.HasCheckpoints(0) || x.HasAnyCheckpoints() {
		t.Errorf("checkpoint %v of a cache that has none", got)
	}
}

// TestDense checks that between two checkpoints that are near enough each block can be reused, as long as both are there.
func TestDense(t *testing.T) {
	x := newCheckpointIndex(1000, 10)
	x.SetSlidingWindow(0, 12)
	blocks := chainOf(1, 60)
	isDense := func(n int) bool { return x.FindCheckpoint(0, blocks[:n]).Dense }
	var p Pin
	x.Add(&p, 0, blocks, 0)
	x.AddCheckpoint(&p, 10, 640, true)
	x.AddCheckpoint(&p, 22, 1408, true)
	x.AddCheckpoint(&p, 36, 2304, true) // 14 blocks after that
	for n, want := range map[int]bool{0: false, 5: true, 10: false, 11: true, 21: true, 22: false, 25: false, 36: false, 40: false} {
		if got := isDense(n); got != want {
			t.Errorf("a prompt that leaves after %d blocks can reuse all of them: %t", n, got)
		}
	}
	if got := x.FindCheckpoint(0, blocks[:15]); got.Tokens != 640 || got.Blocks != 10 {
		t.Errorf("the checkpoint before 15 blocks is %+v", got)
	}

	var q Pin
	fork := append(slices.Clone(blocks[:15]), chainOf(2, 10)...)
	x.Add(&q, 0, fork, 15)
	x.RemoveCheckpoints(&q, 15, 640) // it did not reuse the blocks after the checkpoint
	if isDense(15) || isDense(11) || !isDense(5) {
		t.Error("blocks that a prompt did not reuse still count as reusable, or others do not")
	}
	x.RemoveCheckpoints(&p, 10, 0)
	if isDense(5) || isDense(21) {
		t.Error("without a checkpoint, blocks beside it still count as reusable")
	}

	x = newCheckpointIndex(1000, 10)
	x.Add(&p, 0, blocks, 0)
	x.AddCheckpoint(&p, 10, 640, true)
	if isDense(5) {
		t.Error("blocks can be reused without a window")
	}
}

// TestNewerCheckpointsStay checks that a request does not remove what another one added after it was sent.
func TestNewerCheckpointsStay(t *testing.T) {
	x := newCheckpointIndex(1000, 10)
	blocks := chainOf(1, 10)
	var first, second Pin
	x.Add(&first, 0, blocks, 0)
	x.Add(&second, 0, blocks, 10)
	x.AddCheckpoint(&second, 10, 600, true)
	x.RemoveCheckpoints(&first, 10, 0)
	if got := find(x, blocks); got != [2]int{10, 600} {
		t.Errorf("checkpoint %v", got)
	}
}

// TestCheckpointsTakeRoom checks that checkpoints count against the capacity, and that those used least recently make
// room before blocks that were used later.
func TestCheckpointsTakeRoom(t *testing.T) {
	x := newCheckpointIndex(100, 10)
	for i := range 20 {
		var p Pin
		x.Add(&p, 0, chainOf(i, 5), 0)
		x.AddCheckpoint(&p, 5, 320, true)
		x.Release(&p, nil)
		if c := x.caches[0]; c.size+10*x.CountCheckpoints(0) > 115 {
			t.Fatalf("%d blocks and %d checkpoints of 10 in 100", c.size, x.CountCheckpoints(0))
		}
	}
	if find(x, chainOf(19, 5)) != [2]int{5, 320} || find(x, chainOf(0, 5)) != [2]int{} || x.CountCheckpoints(0) < 5 {
		t.Errorf("%d checkpoints, of the newest %v, of the oldest %v", x.CountCheckpoints(0), find(x, chainOf(19, 5)), find(x, chainOf(0, 5)))
	}
	// A conversation that is used again and again keeps its blocks, and only its latest checkpoints.
	prompt := chainOf(50, 2)
	for turn := range 30 {
		prompt = append(prompt, chainOf(60+turn, 1)...)
		var p Pin
		x.Add(&p, 0, prompt, len(prompt)-1)
		x.AddCheckpoint(&p, len(prompt), 64*len(prompt), true)
		x.Release(&p, nil)
	}
	depth := []int{0}
	if x.Match(prompt, depth); depth[0] != len(prompt) || find(x, prompt)[0] != len(prompt) || x.CountCheckpoints(0) > 7 {
		t.Errorf("%d of %d blocks, checkpoint %v of %d", depth[0], len(prompt), find(x, prompt), x.CountCheckpoints(0))
	}
}

// TestReportedCheckpoints checks that of blocks that a replica reports only the checkpoints count that it reports.
func TestReportedCheckpoints(t *testing.T) {
	x := newCheckpointIndex(1000, 10)
	x.FollowKV()
	blocks := chainOf(1, 6)
	var p Pin
	x.Add(&p, 0, blocks, 0)
	x.AddCheckpoint(&p, 6, 380, true)
	for i := range blocks {
		x.AddLink(0, blocks, i, Link{KV: KVBlock((i + 1) / 2), KVTokens: (i + 1) / 2 * 128, Tokens: (i + 1) * 64})
	}
	for k := range 3 {
		x.StoreKV(0, KVBlock(k+1))
	}
	x.AddReportedCheckpoint(0, 2)
	if got := find(x, blocks); got != [2]int{4, 256} {
		t.Errorf("checkpoint %v, where the replica reports one after 256 tokens", got)
	}
	x.RemoveReportedCheckpoint(0, 2)
	if got := find(x, blocks); got != [2]int{} {
		t.Errorf("checkpoint %v after the replica has removed it", got)
	}
	x.AddReportedCheckpoint(0, 1)
	x.DropCache(0)
	if got := find(x, blocks); got != [2]int{} || x.CountCheckpoints(0) != 0 {
		t.Errorf("checkpoint %v of a cache that was dropped", got)
	}
}

// TestAssumedCheckpointInReportedBlock checks that a checkpoint that was assumed in a block within a KV block does not count once the
// replica reports that, and does not outlive the KV block; and that the one that a request in flight is expected to leave counts.
func TestAssumedCheckpointInReportedBlock(t *testing.T) {
	x := newCheckpointIndex(1000, 10)
	x.FollowKV()
	x.StoreKV(0, 99)
	x.AddReportedCheckpoint(0, 99) // of another prompt
	blocks, fork := chainOf(1, 6), append(chainOf(1, 5), 77)
	var p, q Pin
	x.Add(&p, 0, blocks, 0)
	x.AddCheckpoint(&p, 5, 256, true) // it is in block 4
	if got := find(x, blocks); got != [2]int{5, 256} {
		t.Errorf("checkpoint %v before the replica has reported any", got)
	}
	x.Release(&p, nil)
	for k := range 3 {
		x.StoreKV(0, KVBlock(k+1))
	}
	for i := range blocks {
		x.AddLink(0, blocks, i, Link{KV: KVBlock((i + 1) / 2), KVTokens: (i + 1) / 2 * 128, Tokens: (i + 1) * 64})
	}
	if got := find(x, blocks); got != [2]int{} {
		t.Errorf("checkpoint %v, where the replica reports none", got)
	}
	x.Add(&q, 0, fork, 5)
	x.AddCheckpoint(&q, 5, 256, false)
	if got := find(x, blocks); got != [2]int{5, 256} {
		t.Errorf("checkpoint %v, where a request in flight is expected to leave one", got)
	}
	x.AddReportedCheckpoint(0, 2)
	x.RemoveGuess(&q, 5)
	if x.AddCheckpoint(&q, 5, 256, true) {
		t.Error("a checkpoint was added that the replica reports itself")
	}
	x.Release(&q, nil)
	if got := find(x, fork); got != [2]int{4, 256} {
		t.Errorf("checkpoint %v, where the replica reports one after 256 tokens", got)
	}
	x.RemoveReportedCheckpoint(0, 2)
	for k := range 3 {
		x.RemoveKV(0, KVBlock(3-k))
	}
	if got := find(x, fork); got != [2]int{} { // what follows the KV blocks is still held
		t.Errorf("checkpoint %v after the replica has removed all", got)
	}
}

// TestCheckpointAfterSharedBlocks checks that a checkpoint after the end of the last block that prompts have in common, which the replica
// reports of other blocks only, counts until the replica has removed it.
func TestCheckpointAfterSharedBlocks(t *testing.T) {
	for name, remove := range map[string]func(x *Index){
		"state":    func(x *Index) { x.RemoveReportedCheckpoint(0, 6) },
		"KV block": func(x *Index) { x.RemoveReportedCheckpoint(0, 6); x.RemoveKV(0, 6) },
		"all": func(x *Index) {
			for k := range 6 {
				x.RemoveReportedCheckpoint(0, KVBlock(6-k))
				x.RemoveKV(0, KVBlock(6-k))
			}
		},
	} {
		x := newCheckpointIndex(1000, 10)
		x.FollowKV()
		shared := chainOf(1, 2) // of 70 tokens each, with KV blocks of 25
		ask := func(own, cached int) {
			blocks, depth := append(slices.Clone(shared), chainOf(own, 2)...), []int{0}
			var p Pin
			x.Match(blocks, depth)
			x.Add(&p, 0, blocks, depth[0])
			x.AddCheckpoint(&p, 2, cached, true)
			x.Release(&p, nil)
			for i := range 3 {
				kv := min((i+1)*70/25, 6) // 150 tokens are equal
				x.AddLink(0, blocks, i, Link{KV: KVBlock(kv), KVTokens: 25 * kv, Tokens: 70 * (i + 1)})
			}
		}
		for k := range 6 {
			x.StoreKV(0, KVBlock(k+1))
		}
		x.AddReportedCheckpoint(0, 6)
		ask(10, 0)
		ask(20, 0)
		third := append(slices.Clone(shared), chainOf(30, 2)...)
		if got := find(x, third); got != [2]int{} {
			t.Errorf("checkpoint %v that no prompt has reused", got)
		}
		ask(30, 150)
		fourth := append(slices.Clone(shared), chainOf(40, 2)...)
		if got := find(x, fourth); got != [2]int{2, 150} {
			t.Errorf("checkpoint %v, reused after 150 tokens", got)
		}
		if remove(x); find(x, fourth) != [2]int{} {
			t.Errorf("checkpoint %v after the replica has removed the %s", find(x, fourth), name)
		}
	}
}

func TestImportedCheckpoints(t *testing.T) {
	x := newCheckpointIndex(1000, 10)
	var p Pin
	x.Add(&p, 0, chainOf(1, 10), 0)
	x.AddCheckpoint(&p, 8, 512, true)
	x.Release(&p, nil)
	all, _ := x.Export(0).AppendNext(nil, 100)

	y := New(1, 1<<20) // before its first poll
	y.SetRequestedCapacity(0, 1000)
	var blocks []ImportedBlock
	for _, b := range all[1:] {
		blocks = append(blocks, ImportedBlock{b.Block, b.Parent, b.ParentPlace == 0, b.Checkpoint})
	}
	y.Import(0, len(blocks)).Add(blocks)
	if got := find(y, chainOf(1, 10)); got != [2]int{8, 512} {
		t.Errorf("checkpoint %v after a restart", got)
	}
}

// TestForgottenCheckpointReports checks that what a replica has reported is assumed once its reports are forgotten.
func TestForgottenCheckpointReports(t *testing.T) {
	x := newCheckpointIndex(1000, 10)
	x.FollowKV()
	blocks, fork := chainOf(1, 2), append(chainOf(1, 1), 77)
	for _, prompt := range [][]prompt.Block{blocks, fork} {
		var p Pin
		depth := []int{0}
		x.Match(prompt, depth)
		x.Add(&p, 0, prompt, depth[0])
		x.Release(&p, nil)
		x.AddLink(0, prompt, 0, Link{Tokens: 64})
		x.AddLink(0, prompt, 1, Link{KV: 1, KVTokens: 100, Tokens: 128})
	}
	x.StoreKV(0, 1)
	x.AddReportedCheckpoint(0, 1)
	if find(x, blocks) != [2]int{2, 100} || find(x, fork) != [2]int{2, 100} {
		t.Errorf("checkpoints %v and %v where two prompts part in a KV block after its end", find(x, blocks), find(x, fork))
	}
	x.ForgetReportedCheckpoint(0, 1)
	x.ForgetKV(0, 1)
	if find(x, blocks) != [2]int{2, 100} || x.caches[0].checkpoints.reported != 0 || x.caches[0].checkpoints.count != 2 {
		t.Errorf("checkpoint %v of %+v after the reports were forgotten", find(x, blocks), x.caches[0].checkpoints)
	}
	x.StoreKV(0, 1)
	x.AddReportedCheckpoint(0, 1)
	x.RemoveReportedCheckpoint(0, 1)
	if find(x, blocks) != [2]int{} || find(x, fork) != [2]int{} || x.CountCheckpoints(0) != 0 {
		t.Errorf("checkpoints %v and %v after they were removed", find(x, blocks), find(x, fork))
	}
}
