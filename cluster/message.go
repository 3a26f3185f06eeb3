package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router"
	"warmroute/router/queue"
	"warmroute/router/wire"
)

// A message is, in numbers little-endian,
//
//	magic        4 bytes
//	version      1 byte: plainVersion or signedVersion
//	fingerprint  uint64: proxies with another one hash prompts to other blocks
//	sender       uint64: random for each process
//	number       uint64: 1 for the sender's first message, and one more for each
//	time         uint64: when it was written, in Unix milliseconds
//	names        uvarint number; for each, uvarint length and bytes: addresses, models, keys
//	updates      until the sum; see coder
//	sum          of all before it; see authenticator
const (
	messageMagic  = "wrcl"
	plainVersion  = 3 // the sum is a checksum
	signedVersion = 4 // the sum is an HMAC
	headBytes     = len(messageMagic) + 1 + 4*8

	maxMessageBytes = 2 << 20
	maxNames        = 1 << 12
	maxForks        = 64
	maxUpdates      = 1 << 13
	maxInFlight     = 1 << 16 // placements in an update
	maxTTFT         = time.Hour * 24 * 7
	// maxBlocks bounds the blocks of a prompt or a reply that are sent: 16 MiB of prompt. The rest
	// is left out, which is another prompt with the same beginning.
	maxBlocks = 1 << 16
)

type updateKind byte

const (
	updateSent      = updateKind(router.PlacementSent)      // a router.Placement
	updatePrefilled = updateKind(router.PlacementPrefilled) // the ID of one
	updateEnded     = updateKind(router.PlacementEnded)     // the ID of one, and its router.PlacementEnd
	updateIndexed   = updateKind(router.PlacementIndexed)   // a backend and the blocks that it holds
)

const (
	updateInFlight  = updateIndexed + 1 + iota // all placements that have not ended, without their blocks
	updateKeyUsage                             // what was charged to a key since the last update
	updateResponse                             // a stored response and its backend
	updateForgotten                            // a stored response that is lost
	updateLeaving                              // the sender ends; nothing else
)

// update is one decoded update. The fields that its kind does not name are zero.
type update struct {
	kind     updateKind
	event    router.PlacementEvent // updateSent, updatePrefilled, updateEnded, updateIndexed
	inFlight []router.Placement    // updateInFlight
	usage    keyUsage              // updateKeyUsage
	response storedResponse        // updateResponse, updateForgotten
}

type keyUsage struct {
	name             string
	requests, tokens int64
}

type storedResponse struct {
	id, backend, owner string
}

type messageHead struct {
	fingerprint, sender, number uint64
	written                     time.Time // in milliseconds
}

type encoder struct {
	coder
	events int // updates that were added
}

func newEncoder(addressOf func(*backends.Backend) string) *encoder {
	return &encoder{coder: coder{addressOf: addressOf}}
}

func (e *encoder) empty() bool { return e.events == 0 }

func (e *encoder) reset() {
	e.events = 0
	e.Reset()
}

func (e *encoder) start(kind updateKind) {
	e.kind(&kind)
	e.events++
}

func (e *encoder) addEvent(v *router.PlacementEvent) {
	e.start(updateKind(v.Kind))
	e.event(v)
}

func (e *encoder) addKeyUsage(u *keyUsage) {
	e.start(updateKeyUsage)
	e.keyUsage(u)
}

func (e *encoder) addResponse(kind updateKind, r *storedResponse) {
	e.start(kind)
	e.response(r)
}

// messageVersion returns the version of the messages that a proxy with this authenticator writes and reads.
func (a authenticator) messageVersion() byte {
	if a.isSigned() {
		return signedVersion
	}
	return plainVersion
}

func (e *encoder) message(h messageHead, a authenticator) []byte {
	b := make([]byte, 0, headBytes+e.Len()+a.sumSize()+16)
	b = append(b, messageMagic...)
	b = append(b, a.messageVersion())
	for _, n := range [...]uint64{h.fingerprint, h.sender, h.number, uint64(h.written.UnixMilli())} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	b = append(e.AppendNames(b), e.Data...)
	return a.appendSum(b, messagePurpose, b)
}

var errDamaged = errors.New("message is damaged")

// parseHead returns the head of a message and, in rest, its names and updates. It fails if the
// message is not one of this version, was changed on its way, or, with a secret, if it was not
// written by a proxy with the same secret.
func parseHead(data []byte, a authenticator) (h messageHead, rest []byte, err error) {
	switch {
	case len(data) < headBytes || len(data) > maxMessageBytes:
		return h, nil, fmt.Errorf("message has %d bytes", len(data))
	case string(data[:len(messageMagic)]) != messageMagic:
		return h, nil, errors.New("not a message of warmroute")
	}
	switch version := data[len(messageMagic)]; {
	case version == a.messageVersion():
	case version == signedVersion:
		return h, nil, errors.New("message is signed, but redis.secret_file is not set: give all proxies the same secret")
	case version == plainVersion:
		return h, nil, errors.New("message is not signed: give all proxies the same redis.secret_file")
	default:
		return h, nil, fmt.Errorf("message has version %d, expected %d", version, a.messageVersion())
	}
	end := len(data) - a.sumSize()
	if end < headBytes || !a.verify(data[end:], messagePurpose, data[:end]) {
		if a.isSigned() {
			return h, nil, errors.New("message has an invalid signature: give all proxies the same redis.secret_file")
		}
		return h, nil, errDamaged
	}
	head := data[len(messageMagic)+1:]
	number := func(i int) uint64 { return binary.LittleEndian.Uint64(head[8*i:]) }
	h = messageHead{fingerprint: number(0), sender: number(1), number: number(2), written: time.UnixMilli(int64(number(3)))}
	return h, data[headBytes:end], nil
}

// parseUpdates returns the updates of a message. find returns the backend with an address; the
// placements on others have none. All of them are valid, or there is an error.
func parseUpdates(rest []byte, find func(address string) *backends.Backend) (updates []update, err error) {
	c := coder{Coder: wire.NewReader(rest), find: find, found: map[string]*backends.Backend{}}
	c.ReadNames(maxNames)
	inFlightLists := 0
	for len(c.Data) > 0 && !c.Damaged() {
		r := c.readUpdate()
		if r.kind == updateInFlight {
			inFlightLists++
		}
		if len(updates) == maxUpdates || inFlightLists > 1 {
			return nil, errDamaged
		}
		updates = append(updates, r)
	}
	if c.Damaged() {
		return nil, errDamaged
	}
	return updates, nil
}

// coder writes or reads the parts of updates: each is described once, for both.
type coder struct {
	wire.Coder
	addressOf func(*backends.Backend) string // of a coder that writes

	// Of a coder that reads.
	find  func(address string) *backends.Backend
	found map[string]*backends.Backend // by address
}

func (c *coder) readUpdate() (r update) {
	switch c.kind(&r.kind); r.kind {
	case updateSent, updatePrefilled, updateEnded, updateIndexed:
		r.event.Kind = router.PlacementEventKind(r.kind)
		c.event(&r.event)
	case updateInFlight:
		r.inFlight = make([]router.Placement, c.Count(0, maxInFlight, minAccountBytes))
		for i := range r.inFlight {
			c.account(&r.inFlight[i])
		}
	case updateKeyUsage:
		c.keyUsage(&r.usage)
	case updateResponse, updateForgotten:
		c.response(&r.response)
	case updateLeaving:
	default:
		c.Fail()
	}
	return r
}

func (c *coder) kind(k *updateKind) { wire.Number(&c.Coder, k, updateLeaving) }

// event codes an event, whose kind is known.
func (c *coder) event(v *router.PlacementEvent) {
	switch v.Kind {
	case router.PlacementSent:
		c.account(&v.Placement)
		c.prompt(&v.Placement)
	case router.PlacementPrefilled:
		wire.Number(&c.Coder, &v.ID, math.MaxUint64)
	case router.PlacementEnded:
		wire.Number(&c.Coder, &v.ID, math.MaxUint64)
		c.end(&v.End)
	case router.PlacementIndexed:
		c.backend(&v.Backend)
		c.blocks(&v.Blocks)
	}
}

const minAccountBytes = 7

// maxTokens bounds numbers of tokens and bytes.
const maxTokens = 1 << 40

// account codes what counts of a placement in flight.
func (c *coder) account(p *router.Placement) {
	wire.Number(&c.Coder, &p.ID, math.MaxUint64)
	c.backend(&p.Backend)
	isPrefillRequest, isDecodeRequest := p.RequestKind == router.PrefillRequest, p.RequestKind == router.DecodeRequest
	c.Flags(&p.Retry, &p.Streams, &p.NonGenerative, &p.IsText, &p.TooLong, &p.Prefilled, &isPrefillRequest, &isDecodeRequest)
	switch {
	case isPrefillRequest && isDecodeRequest:
		c.Fail()
	case isPrefillRequest:
		p.RequestKind = router.PrefillRequest
	case isDecodeRequest:
		p.RequestKind = router.DecodeRequest
	}
	wire.Number(&c.Coder, &p.Class, queue.LowPriority)
	wire.Number(&c.Coder, &p.Sequences, 1<<20)
	wire.Number(&c.Coder, &p.PromptTokens, maxTokens)
	wire.Number(&c.Coder, &p.UncachedTokens, maxTokens)
}

func (c *coder) prompt(p *router.Placement) {
	c.Name(&p.Model)
	c.Name(&p.Adapter)
	wire.Number(&c.Coder, &p.Bytes, maxTokens)
	wire.Number(&c.Coder, &p.MaxOutput, maxTokens)
	wire.Number(&c.Coder, &p.TextClass, prompt.TextClasses-1)
	wire.Number(&c.Coder, &p.Turn, prompt.TurnLater)
	c.Uint64(&p.PromptKey)
	c.Uint64(&p.Conversation)
	c.Uint64(&p.Tenant)
	const forkBytes = 1 + 3*4
	forks := p.Forks[:min(len(p.Forks), maxForks)]
	if n := c.Count(len(forks), maxForks, forkBytes); c.Reads() {
		forks = make([]prompt.Fork, n)
		p.Forks = forks
	}
	for i := range forks {
		f := &forks[i]
		wire.Number(&c.Coder, &f.Bit, math.MaxUint8)
		c.Share(&f.Without)
		c.Share(&f.WithoutMost)
		c.Share(&f.With)
		if !slices.Contains(prompt.LayoutBits[:], f.Bit) {
			c.Fail()
		}
	}
	c.blocks(&p.Blocks)
}

func (c *coder) end(v *router.PlacementEnd) {
	wire.Number(&c.Coder, &v.Outcome.End, router.Truncated)
	wire.Number(&c.Coder, &v.OutputTokens, maxTokens)
	wire.Number(&c.Coder, &v.PromptTokens, maxTokens)
	c.Flags(&v.CachedKnown)
	wire.Number(&c.Coder, &v.CachedTokens, maxTokens)
	wire.Number(&c.Coder, &v.TTFT, maxTTFT)
	wire.Number(&c.Coder, &v.QueuedAhead, maxTokens)
	c.blocks(&v.Reply)
}

func (c *coder) keyUsage(u *keyUsage) {
	c.Name(&u.name)
	c.Varint(&u.requests)
	c.Varint(&u.tokens)
}

func (c *coder) response(r *storedResponse) {
	c.Text(&r.id, wire.MaxNameBytes)
	c.Name(&r.backend)
	c.Name(&r.owner)
}

// blocks codes the first maxBlocks of a list.
func (c *coder) blocks(list *[]prompt.Block) {
	n := c.Count(min(len(*list), maxBlocks), maxBlocks, 8)
	if c.Reads() {
		*list = make([]prompt.Block, n)
	} else {
		c.Data = slices.Grow(c.Data, 8*n)
	}
	for i := range n {
		c.Uint64((*uint64)(&(*list)[i]))
	}
}

// backend codes a backend by its address; nil if there is none.
func (c *coder) backend(b **backends.Backend) {
	var address string
	if !c.Reads() && *b != nil {
		address = c.addressOf(*b)
	}
	if c.Name(&address); !c.Reads() {
		return
	}
	found, known := c.found[address]
	if !known {
		found = c.find(address)
		c.found[address] = found
	}
	*b = found
}
