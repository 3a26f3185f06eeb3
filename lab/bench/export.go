package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"

	"warmroute/lab/replay"
)

// exportBlockTokens is the size of the blocks of Mooncake's format.
const exportBlockTokens = 512

// runExport writes the requests of a trace, with arrivals scaled to a load, for another load generator.
func runExport(_ context.Context, args []string) error {
	flags := flag.NewFlagSet("export", flag.ExitOnError)
	path := flags.String("trace", "", "trace in a format that replay reads")
	requests := flags.Int("requests", 0, "write only the first `N` requests; 0: all")
	load := flags.Float64("load", 0.9, "offered tokens as a share of what the replicas can compute without a cache; 0: as recorded")
	replicas := flags.Int("backends", 8, "number of replicas")
	seed := flags.Uint64("seed", 1, "`SEED` of the arrivals within one timestamp of the trace")
	format := flags.String("format", "mooncake", "mooncake, or weka: guidellm's, in which a turn has only what it adds to its conversation")
	flags.Parse(args)

	trace, err := readScaledTrace(*path, *seed, *requests, *load, *replicas)
	if err != nil {
		return err
	}
	out := bufio.NewWriter(os.Stdout)
	switch *format {
	case "mooncake":
		err = trace.WriteMooncake(out)
	case "weka":
		err = writeWekaTurns(out, trace)
	default:
		err = fmt.Errorf("-format: unknown format %s; choose mooncake or weka", *format)
	}
	return errors.Join(err, out.Flush())
}

// wekaConversation is a line of guidellm's data kind weka. guidellm sends each request after all earlier ones of the
// conversation and their responses.
type wekaConversation struct {
	ID       string     `json:"id"`
	Requests []wekaTurn `json:"requests"`

	last *replay.TraceRequest
}

type wekaTurn struct {
	Seconds float64  `json:"t"`
	Input   int      `json:"in"`
	Output  int      `json:"out"`
	HashIDs []uint64 `json:"hash_ids"`
}

// writeWekaTurns writes the conversations of a trace with blocks of 512 tokens in the order of their beginnings. A request
// that continues no earlier one of its session begins a conversation.
func writeWekaTurns(w io.Writer, trace *replay.Trace) error {
	if trace.BlockTokens != exportBlockTokens {
		return fmt.Errorf("trace has blocks of %d tokens: convert it with warmroute replay --export mooncake", trace.BlockTokens)
	}
	var conversations []*wekaConversation
	bySession := map[uint64][]*wekaConversation{}
	ids := map[uint64]uint64{} // guidellm accepts those of 32 bits only
	for i := range trace.Requests {
		q := &trace.Requests[i]
		added, c := q.PromptTokens, findContinued(bySession[q.Conversation], q)
		if c == nil {
			c = &wekaConversation{ID: strconv.Itoa(len(conversations))}
			conversations = append(conversations, c)
			if q.Conversation != 0 {
				bySession[q.Conversation] = append(bySession[q.Conversation], c)
			}
		} else {
			added -= c.last.PromptTokens + c.last.OutputTokens
		}
		turn := wekaTurn{Seconds: q.At.Seconds(), Input: added, Output: q.OutputTokens, HashIDs: []uint64{}}
		full := q.Blocks[:q.PromptTokens/exportBlockTokens]
		for _, block := range full[len(full)-added/exportBlockTokens:] {
			if _, known := ids[block]; !known {
				ids[block] = uint64(len(ids))
			}
			turn.HashIDs = append(turn.HashIDs, ids[block])
		}
		c.Requests, c.last = append(c.Requests, turn), q
	}
	lines := json.NewEncoder(w)
	for _, c := range conversations {
		if err := lines.Encode(c); err != nil {
			return err
		}
	}
	return nil
}

// findContinued returns the conversation that q continues, or nil: q's prompt begins with the full blocks of the
// conversation's last prompt, as many as possible, and is longer than that and its output.
func findContinued(conversations []*wekaConversation, q *replay.TraceRequest) *wekaConversation {
	var longest *wekaConversation
	most := 0
	for _, c := range conversations {
		full := c.last.PromptTokens / exportBlockTokens
		if full > most && q.PromptTokens > c.last.PromptTokens+c.last.OutputTokens &&
			slices.Equal(q.Blocks[:full], c.last.Blocks[:full]) {
			longest, most = c, full
		}
	}
	return longest
}
