package cluster

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"time"

	"warmroute/clock"
)

const (
	// snapshotInterval is how often one of the proxies writes a snapshot.
	snapshotInterval = time.Minute
	// snapshotLifetime is how long Redis keeps one.
	snapshotLifetime = maxMessageAge
	// pieceBytes is the size of a value, and pieceInterval the time between two that are written:
	// other users of Redis wait for each.
	pieceBytes    = 256 << 10
	pieceInterval = 50 * time.Millisecond
	maxPieces     = 1 << 10
	piecesAtOnce  = 16 // are read
	maxHeadBytes  = 1 << 10
	// headTimeout bounds how long the start of a proxy waits for Redis, and loadTimeout how long for a snapshot that it has.
	headTimeout = 1500 * time.Millisecond
	loadTimeout = 5 * time.Second
)

// snapshotHead names the pieces of a snapshot, each of which is a value of its own.
type snapshotHead struct {
	Generation string `json:"generation"`
	Bytes      int    `json:"bytes"`
	Position   string `json:"position"` // of the stream; what is later there is not in the snapshot
	Sum        []byte `json:"sum"`      // of the other fields and the pieces; see authenticator
}

var (
	validGeneration = regexp.MustCompile(`^[A-Z0-9]{1,64}$`)
	validPosition   = regexp.MustCompile(`^[0-9]{1,19}-[0-9]{1,19}$`)
)

func (h *snapshotHead) sum(a authenticator, data []byte) []byte {
	head := fmt.Appendf(nil, "%s %s %d ", h.Generation, h.Position, h.Bytes)
	return a.appendSum(nil, snapshotPurpose, append(head, data...))
}

func (h *snapshotHead) pieces() int { return (h.Bytes + pieceBytes - 1) / pieceBytes }

func (c *Cluster) headKey() string { return c.Settings.Prefix + "snapshot" }

func (c *Cluster) pieceKey(h *snapshotHead, i int) string {
	return c.Settings.Prefix + "snapshot:" + h.Generation + ":" + strconv.Itoa(i)
}

func (c *Cluster) pieceKeys(h *snapshotHead) (keys []string) {
	for i := range h.pieces() {
		keys = append(keys, c.pieceKey(h, i))
	}
	return keys
}

// LoadSnapshot reads the snapshot that another proxy has written, if there is one, for the first
// polls of the backends. It takes up to headTimeout if Redis does not answer, else up to loadTimeout. Call it before Run and
// before the first poll.
func (c *Cluster) LoadSnapshot(ctx context.Context) {
	if c.Snapshot == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	head, data, err := c.readSnapshot(ctx)
	if err == nil && head != nil {
		err = c.Snapshot.ReadPending(bytes.NewReader(data))
	}
	switch {
	case err != nil:
		c.Log.Warn("no snapshot loaded from redis", "err", err)
	case head != nil:
		c.position = head.Position
		c.Log.Info("snapshot loaded from redis", "bytes", len(data))
	}
}

// readSnapshot returns the latest snapshot; nil if there is none. What it reads is bounded, whatever
// the values are.
func (c *Cluster) readSnapshot(ctx context.Context) (*snapshotHead, []byte, error) {
	headContext, cancel := context.WithTimeout(ctx, headTimeout)
	defer cancel()
	h, err := c.readHead(headContext)
	if h == nil {
		return nil, nil, err
	}
	data := make([]byte, 0, h.Bytes)
	for keys := range slices.Chunk(c.pieceKeys(h), piecesAtOnce) {
		pieces, err := c.redis.ReadValues(ctx, keys, pieceBytes)
		if err != nil {
			return nil, nil, err
		}
		for _, piece := range pieces {
			data = append(data, piece...)
		}
	}
	if len(data) != h.Bytes || !hmac.Equal(h.Sum, h.sum(c.auth, data)) {
		return nil, nil, errors.New("snapshot is damaged, was replaced while it was read, or was written with another redis.secret_file")
	}
	if age := time.Since(entryTime(h.Position)); c.auth.isSigned() && age.Abs() > maxMessageAge {
		return nil, nil, fmt.Errorf("snapshot is %v old: set the clocks of all proxies and of Redis", age.Round(time.Second))
	}
	return h, data, nil
}

// readHead returns the head of the latest snapshot; nil if there is none.
func (c *Cluster) readHead(ctx context.Context) (*snapshotHead, error) {
	values, err := c.redis.ReadValues(ctx, []string{c.headKey()}, maxHeadBytes)
	if err != nil || len(values[0]) == 0 {
		return nil, err
	}
	h, err := parseSnapshotHead(values[0])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.headKey(), err)
	}
	return h, nil
}

func parseSnapshotHead(text []byte) (*snapshotHead, error) {
	var h snapshotHead
	if err := json.Unmarshal(text, &h); err != nil {
		return nil, err
	}
	if h.Bytes < 0 || h.Bytes > maxPieces*pieceBytes || !validGeneration.MatchString(h.Generation) || !validPosition.MatchString(h.Position) {
		return nil, errors.New("invalid head of a snapshot")
	}
	return &h, nil
}

// readHeadOrNil is readHead for a head that may be invalid.
func (c *Cluster) readHeadOrNil(ctx context.Context) *snapshotHead {
	h, err := c.readHead(ctx)
	if err != nil {
		return nil
	}
	return h
}

// deletePieces deletes the values of a snapshot that was replaced. A proxy that reads it at the time
// starts without one.
func (c *Cluster) deletePieces(ctx context.Context, h *snapshotHead) error {
	if h == nil {
		return nil
	}
	return c.redis.DeleteValues(ctx, c.pieceKeys(h))
}

// writeSnapshots writes a snapshot every snapshotInterval, unless another proxy does, until ctx is done.
func (c *Cluster) writeSnapshots(ctx context.Context) {
	for clock.Sleep(ctx, snapshotInterval) {
		if err := c.writeSnapshot(ctx); err != nil && ctx.Err() == nil {
			c.logs.snapshot.Do(func() { c.Log.Warn("failed to write snapshot to redis", "err", err) })
		}
	}
}

// writeSnapshot writes a snapshot, unless another proxy has written one in this interval.
func (c *Cluster) writeSnapshot(ctx context.Context) error {
	id := strconv.AppendUint(nil, c.id, 16)
	if isWritten, err := c.redis.WriteValue(ctx, c.Settings.Prefix+"snapshot-lock", id, snapshotInterval*9/10, true); !isWritten {
		return err
	}
	h := snapshotHead{Generation: rand.Text(), Position: c.readPosition()}
	if !validPosition.MatchString(h.Position) {
		return nil // nothing was read yet
	}
	var data bytes.Buffer
	if err := c.Snapshot.Write(&data); err != nil {
		return err
	}
	h.Bytes = data.Len()
	h.Sum = h.sum(c.auth, data.Bytes())
	if h.pieces() > maxPieces {
		return fmt.Errorf("snapshot has %d bytes, more than %d: lower index.max_bytes", h.Bytes, maxPieces*pieceBytes)
	}
	set := func(key string, value []byte) error {
		_, err := c.redis.WriteValue(ctx, key, value, snapshotLifetime, false)
		return err
	}
	for i := 0; data.Len() > 0; i++ {
		if err := set(c.pieceKey(&h, i), data.Next(pieceBytes)); err != nil {
			return err
		}
		if !clock.Sleep(ctx, pieceInterval) {
			return ctx.Err()
		}
	}
	head, err := json.Marshal(&h)
	if err != nil {
		return err
	}
	previous := c.readHeadOrNil(ctx)
	if err := set(c.headKey(), head); err != nil {
		return err
	}
	return c.deletePieces(ctx, previous)
}
