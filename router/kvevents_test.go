package router

import (
	"strconv"
	"time"

	"warmroute/backends"
	"warmroute/router/index"
)

// testFollower follows a replica whose KV blocks are blocks of prompts, and which evicts nothing.
type testFollower struct {
	router   *Router
	backend  *backends.Backend
	sessions int
	ended    []KVRequest
}

// followAll sets a testFollower for each backend.
func followAll(r *Router, fleet []*backends.Backend) (followers []*testFollower) {
	for _, b := range fleet {
		f := &testFollower{router: r, backend: b}
		r.SetKVFollower(b, f)
		followers = append(followers, f)
	}
	return followers
}

func (f *testFollower) NewSessionName() string {
	f.sessions++
	return f.backend.Name + strconv.Itoa(f.sessions)
}

func (f *testFollower) RecordEnd(q KVRequest, _ time.Time) { f.ended = append(f.ended, q) }
func (f *testFollower) RestoreIndex()                      {}
func (f *testFollower) RecordCacheReset()                  {}
func (f *testFollower) Status() (int, bool)                { return 0, true }
func (f *testFollower) Close()                             { f.router.SetKVFollower(f.backend, nil) }

// settle links the blocks of the requests that have ended, and confirms them.
func (f *testFollower) settle() {
	f.router.UpdateIndex(f.backend, func(x *index.Index, _ time.Time) {
		x.FollowKV()
		for _, q := range f.ended {
			for i, b := range q.Blocks {
				tokens := q.PromptTokens * (i + 1) / len(q.Blocks)
				x.StoreKV(f.backend.Slot, index.KVBlock(b))
				x.AddLink(f.backend.Slot, q.Blocks, i, index.Link{KV: index.KVBlock(b), KVTokens: tokens, Tokens: tokens})
			}
		}
		f.ended = nil
	})
}
