package index_test

import (
	"fmt"

	"warmroute/prompt"
	"warmroute/router/index"
)

func ExampleIndex() {
	// Two backends, of which each has a prefix cache of 100 blocks.
	x := index.New(2, 1<<20)
	x.SetRequestedCapacity(0, 100)
	x.SetRequestedCapacity(1, 100)

	// The first one is sent a prompt of three blocks, of which it holds none yet.
	var pin index.Pin
	x.Add(&pin, 0, []prompt.Block{11, 12, 13}, 0)
	// The request ends. Its blocks are likely to stay in the replica's cache.
	x.Release(&pin, nil)

	// The next prompt begins like it.
	depth := make([]int, 2)
	x.Match([]prompt.Block{11, 12, 21}, depth)
	fmt.Println("leading blocks that each backend holds:", depth)
	// Output: leading blocks that each backend holds: [2 0]
}
