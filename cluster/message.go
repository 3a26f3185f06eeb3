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
//	records      until the sum; see encoder
//	sum          of all before it; see authenticator
const (
	messageMagic  = "wrcl"
	plainVersion  = 1 // the sum is a checksum
	signedVersion = 2 // the sum is an HMAC
	headBytes     = len(messageMagic) + 1 + 4*8

	maxMessageBytes = 2 << 20
	maxNames        = 1 << 12
	maxNameBytes    = 4 << 10
	maxForks        = 64
	maxRecords      = 1 << 13
	maxInFlight     = 1 << 16 // placements in a record
	// maxBlocks bounds the blocks of a prompt or a reply that are sent: 16 MiB of prompt. The rest
	// is left out, which is another prompt with the same beginning.
	maxBlocks = 1 << 16
)

// recordKind is the first byte of a record.
type recordKind byte

const (
	recordSent      recordKind = iota + 1 // a router.Placement
	recordPrefilled                       // the ID of one
	recordEnded                           // the ID of one, and its router.PlacementEnd
	recordInFlight                        // all placements that have not ended, without their blocks
	recordKeyUsage                        // what was charged to a key since the last record
	recordResponse                        // a stored response and its backend
	recordForgotten                       // a stored response that is lost
	recordIndexed                         // a backend and the blocks that it holds
	recordLeaving                         // the sender ends; nothing else
)

// record is one decoded record. The fields that its kind does not name are zero.
type record struct {
	kind     recordKind
	event    router.PlacementEvent // recordSent, recordPrefilled, recordEnded, recordIndexed
	inFlight []router.Placement    // recordInFlight
	usage    keyUsage              // recordKeyUsage
	response storedResponse        // recordResponse, recordForgotten
}

// keyUsage is what a proxy has charged to an API key.
type keyUsage struct {
	name             string
	requests, tokens int64
}

// storedResponse says which backend holds a response, and whose it is.
type storedResponse struct {
	id, backend, owner string
}

// messageHead is what a message begins with.
type messageHead struct {
	fingerprint, sender, number uint64
	written                     time.Time // in milliseconds
}

// encoder builds the names and records of one message.
type encoder struct {
	names   []string
	records []byte
	events  int // records that were added
	size    int // of the names, in bytes
}

func (e *encoder) empty() bool { return e.events == 0 }

// reset empties the encoder, which keeps its memory.
func (e *encoder) reset() {
	clear(e.names)
	*e = encoder{names: e.names[:0], records: e.records[:0]}
}

func (e *encoder) len() int { return e.size + len(e.records) }

// name returns the number of a name. There are few in one message.
func (e *encoder) name(name string) uint64 {
	for i, known := range e.names {
		if known == name {
			return uint64(i)
		}
	}
	if len(name) > maxNameBytes {
		name = name[:maxNameBytes]
	}
	e.names = append(e.names, name)
	e.size += len(name) + 2
	return uint64(len(e.names) - 1)
}

func (e *encoder) start(kind recordKind) {
	e.records = append(e.records, byte(kind))
	e.events++
}

func (e *encoder) uvarint(n uint64) { e.records = binary.AppendUvarint(e.records, n) }
func (e *encoder) varint(n int64)   { e.records = binary.AppendVarint(e.records, n) }
func (e *encoder) uint64(n uint64)  { e.records = binary.LittleEndian.AppendUint64(e.records, n) }
func (e *encoder) count(n float64)  { e.uvarint(uint64(min(max(0, n), 1<<40))) }

func (e *encoder) share(x float64) {
	e.records = binary.LittleEndian.AppendUint32(e.records, math.Float32bits(float32(min(max(0, x), 1))))
}

func (e *encoder) blocks(list []prompt.Block) {
	list = list[:min(len(list), maxBlocks)]
	e.uvarint(uint64(len(list)))
	at := len(e.records)
	e.records = slices.Grow(e.records, 8*len(list))[:at+8*len(list)]
	for _, b := range list {
		binary.LittleEndian.PutUint64(e.records[at:], uint64(b))
		at += 8
	}
}

// addEvent adds an event. address is that of its backend, if it has one.
func (e *encoder) addEvent(v *router.PlacementEvent, address string) {
	switch v.Kind {
	case router.PlacementSent:
		e.start(recordSent)
		a := accountOf(&v.Placement, address)
		e.addAccount(v.ID, &a)
		e.addPrompt(&v.Placement)
	case router.PlacementPrefilled:
		e.start(recordPrefilled)
		e.uvarint(v.ID)
	case router.PlacementEnded:
		e.start(recordEnded)
		e.uvarint(v.ID)
		e.addEnd(&v.End)
	case router.PlacementIndexed:
		e.start(recordIndexed)
		e.uvarint(e.name(address))
		e.blocks(v.Blocks)
	}
}

// account is what counts of a placement in flight.
type account struct {
	address                      string // of the backend
	flags                        uint8
	class                        queue.Class
	sequences                    int64
	promptTokens, uncachedTokens float64
}

// flagPrefilled is the flag of Placement.Prefilled, the last of the flags.
const flagPrefilled = 1 << 5

func accountOf(p *router.Placement, address string) account {
	a := account{address: address, class: p.Class, sequences: p.Sequences, promptTokens: p.PromptTokens, uncachedTokens: p.UncachedTokens}
	for i, set := range [...]bool{p.Retry, p.Streams, p.NonGenerative, p.IsText, p.TooLong, p.Prefilled} {
		if set {
			a.flags |= 1 << i
		}
	}
	return a
}

func (e *encoder) addAccount(id uint64, a *account) {
	e.uvarint(id)
	e.uvarint(e.name(a.address))
	e.uvarint(uint64(a.flags))
	e.uvarint(uint64(a.class))
	e.uvarint(uint64(a.sequences))
	e.count(a.promptTokens)
	e.count(a.uncachedTokens)
}

// addPrompt adds the rest of a placement.
func (e *encoder) addPrompt(p *router.Placement) {
	e.uvarint(e.name(p.Model))
	e.uvarint(e.name(p.Adapter))
	e.uvarint(uint64(max(0, p.Bytes)))
	e.uvarint(uint64(max(0, p.MaxOutput)))
	e.uvarint(uint64(p.TextClass))
	e.uvarint(uint64(p.Turn))
	e.uint64(p.PromptKey)
	e.uint64(p.Session)
	forks := p.Forks[:min(len(p.Forks), maxForks)]
	e.uvarint(uint64(len(forks)))
	for _, f := range forks {
		e.uvarint(uint64(f.Bit))
		e.share(f.Without)
		e.share(f.WithoutMost)
		e.share(f.With)
	}
	e.blocks(p.Blocks)
}

func (e *encoder) addEnd(v *router.PlacementEnd) {
	e.uvarint(uint64(v.Outcome.End))
	e.uvarint(uint64(max(0, v.OutputTokens)))
	e.uvarint(uint64(max(0, v.PromptTokens)))
	cached := uint64(0) // not known
	if v.CachedKnown {
		cached = 1 + uint64(max(0, v.CachedTokens))
	}
	e.uvarint(cached)
	e.uvarint(uint64(max(0, v.TTFT.Microseconds())))
	e.count(v.QueuedAhead)
	e.blocks(v.Reply)
}

func (e *encoder) addKeyUsage(u *keyUsage) {
	e.start(recordKeyUsage)
	e.uvarint(e.name(u.name))
	e.varint(u.requests)
	e.varint(u.tokens)
}

func (e *encoder) addResponse(kind recordKind, r *storedResponse) {
	e.start(kind)
	e.uvarint(uint64(len(r.id)))
	e.records = append(e.records, r.id...)
	e.uvarint(e.name(r.backend))
	e.uvarint(e.name(r.owner))
}

// messageVersion returns the version of the messages that a proxy with this authenticator writes
// and reads.
func (a authenticator) messageVersion() byte {
	if a.isSigned() {
		return signedVersion
	}
	return plainVersion
}

// message returns the whole message.
func (e *encoder) message(h messageHead, a authenticator) []byte {
	b := make([]byte, 0, headBytes+e.len()+a.sumSize()+16)
	b = append(b, messageMagic...)
	b = append(b, a.messageVersion())
	for _, n := range [...]uint64{h.fingerprint, h.sender, h.number, uint64(h.written.UnixMilli())} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	b = binary.AppendUvarint(b, uint64(len(e.names)))
	for _, name := range e.names {
		b = append(binary.AppendUvarint(b, uint64(len(name))), name...)
	}
	b = append(b, e.records...)
	return a.appendSum(b, messagePurpose, b)
}

var errDamaged = errors.New("message is damaged")

// parseHead returns the head of a message and, in rest, its names and records. It fails if the
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

// parseRecords returns the records of a message. find returns the backend with an address; the
// placements on others have none. All of them are valid, or there is an error.
func parseRecords(rest []byte, find func(address string) *backends.Backend) (records []record, err error) {
	d := decoder{rest: rest, find: find}
	d.names = make([]string, d.number(maxNames, 1))
	for i := range d.names {
		d.names[i] = d.text(maxNameBytes)
	}
	d.backends = make([]*backends.Backend, len(d.names))
	for len(d.rest) > 0 && !d.damaged {
		if len(records) == maxRecords {
			return nil, errDamaged
		}
		records = append(records, d.record())
	}
	if d.damaged {
		return nil, errDamaged
	}
	return records, nil
}

// decoder reads the parts of a message. After the first error it returns zeros.
type decoder struct {
	rest    []byte
	damaged bool

	hasInFlight bool // a record of that kind was read

	names    []string
	backends []*backends.Backend // by name; nil: not looked up, or there is none
	find     func(address string) *backends.Backend
}

func (d *decoder) record() (r record) {
	r.kind = recordKind(d.bytes(1)[0])
	switch r.kind {
	case recordSent:
		r.event.Kind = router.PlacementSent
		r.event.Placement = d.account()
		d.prompt(&r.event.Placement)
	case recordPrefilled:
		r.event.Kind = router.PlacementPrefilled
		r.event.ID = d.uvarint()
	case recordEnded:
		r.event.Kind = router.PlacementEnded
		r.event.ID = d.uvarint()
		r.event.End = d.end()
	case recordIndexed:
		r.event.Kind = router.PlacementIndexed
		r.event.Backend = d.backend()
		r.event.Blocks = d.blocks()
	case recordInFlight:
		d.damaged = d.damaged || d.hasInFlight // there is one in a message
		d.hasInFlight = true
		r.inFlight = make([]router.Placement, 0, d.number(maxInFlight, minAccountBytes))
		for range cap(r.inFlight) {
			r.inFlight = append(r.inFlight, d.account())
		}
	case recordKeyUsage:
		r.usage = keyUsage{name: d.name(), requests: d.varint(), tokens: d.varint()}
	case recordResponse, recordForgotten:
		r.response = storedResponse{id: d.text(maxNameBytes), backend: d.name(), owner: d.name()}
	case recordLeaving:
	default:
		d.damaged = true
	}
	return r
}

// minAccountBytes is the least that account reads.
const minAccountBytes = 7

func (d *decoder) account() (p router.Placement) {
	p.ID = d.uvarint()
	p.Backend = d.backend()
	flags := d.uvarint()
	for i, set := range [...]*bool{&p.Retry, &p.Streams, &p.NonGenerative, &p.IsText, &p.TooLong, &p.Prefilled} {
		*set = flags&(1<<i) != 0
	}
	p.Class = queue.Class(d.below(uint64(queue.Batch) + 1))
	p.Sequences = int64(d.below(1 << 20))
	p.PromptTokens = float64(d.below(1 << 41))
	p.UncachedTokens = float64(d.below(1 << 41))
	return p
}

func (d *decoder) prompt(p *router.Placement) {
	p.Model, p.Adapter = d.name(), d.name()
	p.Bytes, p.MaxOutput = int(d.below(1<<40)), int(d.below(1<<40))
	p.TextClass = prompt.TextClass(d.below(uint64(prompt.TextClasses)))
	p.Turn = prompt.Turn(d.below(uint64(prompt.TurnLater) + 1))
	p.PromptKey, p.Session = d.uint64(), d.uint64()
	const forkBytes = 1 + 3*4
	p.Forks = make([]prompt.Fork, d.number(maxForks, forkBytes))
	for i := range p.Forks {
		bit := prompt.Layout(d.below(1 << 8))
		if !slices.Contains(prompt.LayoutBits[:], bit) {
			d.damaged = true
		}
		p.Forks[i] = prompt.Fork{Bit: bit, Without: d.share(), WithoutMost: d.share(), With: d.share()}
	}
	p.Blocks = d.blocks()
}

func (d *decoder) end() (v router.PlacementEnd) {
	v.Outcome.End = router.End(d.below(uint64(router.Truncated) + 1))
	v.OutputTokens, v.PromptTokens = int(d.below(1<<40)), int(d.below(1<<40))
	if cached := d.below(1 << 40); cached > 0 {
		v.CachedKnown, v.CachedTokens = true, int(cached-1)
	}
	v.TTFT = time.Duration(d.below(1<<40)) * time.Microsecond
	v.QueuedAhead = float64(d.below(1 << 41))
	v.Reply = d.blocks()
	return v
}

func (d *decoder) blocks() []prompt.Block {
	list := make([]prompt.Block, d.number(maxBlocks, 8))
	for i := range list {
		list[i] = prompt.Block(d.uint64())
	}
	return list
}

// bytes returns the next n bytes, or zeros.
func (d *decoder) bytes(n int) []byte {
	if d.damaged || n > len(d.rest) {
		d.damaged = true
		return make([]byte, n)
	}
	b := d.rest[:n]
	d.rest = d.rest[n:]
	return b
}

func (d *decoder) uvarint() uint64 {
	n, size := binary.Uvarint(d.rest)
	if d.damaged || size <= 0 {
		d.damaged = true
		return 0
	}
	d.rest = d.rest[size:]
	return n
}

func (d *decoder) varint() int64 {
	n, size := binary.Varint(d.rest)
	if d.damaged || size <= 0 {
		d.damaged = true
		return 0
	}
	d.rest = d.rest[size:]
	return n
}

// below reads a number below limit.
func (d *decoder) below(limit uint64) uint64 {
	n := d.uvarint()
	if n >= limit {
		d.damaged = true
		return 0
	}
	return n
}

func (d *decoder) uint64() uint64 { return binary.LittleEndian.Uint64(d.bytes(8)) }

// share reads a number from 0 to 1.
func (d *decoder) share() float64 {
	x := float64(math.Float32frombits(binary.LittleEndian.Uint32(d.bytes(4))))
	if !(x >= 0 && x <= 1) {
		d.damaged = true
		return 0
	}
	return x
}

// number reads a number of things of minSize bytes each, of which there is room for no more than
// the rest holds.
func (d *decoder) number(limit, minSize int) int {
	n := d.uvarint()
	if n > uint64(limit) || n > uint64(len(d.rest)/minSize) {
		d.damaged = true
		return 0
	}
	return int(n)
}

// text reads a string of at most maxBytes, at most maxNameBytes.
func (d *decoder) text(maxBytes int) string {
	n := d.uvarint()
	if n > uint64(maxBytes) || n > uint64(len(d.rest)) {
		d.damaged = true
		return ""
	}
	return string(d.bytes(int(n)))
}

func (d *decoder) nameNumber() int {
	n := d.uvarint()
	if n >= uint64(len(d.names)) {
		d.damaged = true
		return -1
	}
	return int(n)
}

func (d *decoder) name() string {
	n := d.nameNumber()
	if n < 0 {
		return ""
	}
	return d.names[n]
}

// backend reads a name that is a backend's address.
func (d *decoder) backend() *backends.Backend {
	n := d.nameNumber()
	if n < 0 {
		return nil
	}
	if d.backends[n] == nil {
		d.backends[n] = d.find(d.names[n])
	}
	return d.backends[n]
}
