package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"time"

	"warmroute/cluster/redis"
)

const (
	// maxSharedRecords and maxSharedRecordBytes bound the records that are read.
	maxSharedRecords     = 1 << 13
	maxSharedRecordBytes = 16 << 10
	// maxSharedRecordAge is how long ago a signed record may have been written. Other clients of Redis can write copies of
	// earlier ones, such as that of a replica that was removed since. Who has a record writes it again when it is too old.
	maxSharedRecordAge = 12 * time.Hour
	// abandonedRecordAge is the age at which a signed record is deleted, since no proxy writes it any more.
	abandonedRecordAge = 4 * maxSharedRecordAge
)

// Records are named values that all proxies share, in one hash of Redis. The last one written counts. Safe for
// concurrent use.
type Records struct {
	redis *redis.Client
	key   string // of the hash
	auth  authenticator
}

// Records returns the records of all proxies.
func (c *Cluster) Records() *Records {
	return &Records{redis: c.redis, key: c.Settings.Prefix + "fleet", auth: c.auth}
}

// ReadRecords returns all records, without those that are invalid or too old.
func (r *Records) ReadRecords(ctx context.Context) (map[string][]byte, error) {
	fields, err := r.redis.ReadHash(ctx, r.key, maxSharedRecords)
	if err != nil {
		return nil, err
	}
	records, abandoned, now := map[string][]byte{}, []string{}, time.Now()
	for name, value := range fields {
		data, written, err := parseSharedRecord(name, []byte(value), r.auth)
		if err != nil {
			continue // of another version or secret, or of another writer
		}
		switch age := now.Sub(written).Abs(); {
		case !r.auth.isSigned() || age <= maxSharedRecordAge:
			records[name] = data
		case age > abandonedRecordAge:
			abandoned = append(abandoned, name)
		}
	}
	if len(abandoned) > 0 {
		err = r.redis.UpdateHash(ctx, r.key, nil, abandoned)
	}
	return records, err
}

// WriteRecords replaces some records, and removes others.
func (r *Records) WriteRecords(ctx context.Context, changed map[string][]byte, removed []string) error {
	var set []any
	now := time.Now()
	for name, data := range changed {
		set = append(set, name, appendSharedRecord(nil, name, data, now, r.auth))
	}
	return r.redis.UpdateHash(ctx, r.key, set, removed)
}

// appendSharedRecord appends a record as Redis has it: the sum of what follows, when it is written, and its data.
func appendSharedRecord(b []byte, name string, data []byte, now time.Time, a authenticator) []byte {
	signed := binary.LittleEndian.AppendUint64(nil, uint64(now.UnixMilli()))
	signed = append(signed, data...)
	return append(a.appendSum(b, recordPurpose, nameAndData(name, signed)), signed...)
}

// parseSharedRecord returns the data of a record, and when it was written.
func parseSharedRecord(name string, value []byte, a authenticator) (data []byte, written time.Time, err error) {
	if len(value) > maxSharedRecordBytes || len(value) < a.sumSize()+8 {
		return nil, time.Time{}, errors.New("record is too short or too long")
	}
	sum, signed := value[:a.sumSize()], value[a.sumSize():]
	if !a.verify(sum, recordPurpose, nameAndData(name, signed)) {
		return nil, time.Time{}, errors.New("record is damaged, or was written with another redis.secret_file")
	}
	return signed[8:], time.UnixMilli(int64(binary.LittleEndian.Uint64(signed))), nil
}

// nameAndData returns what the sum of a record covers: one with another name is invalid.
func nameAndData(name string, signed []byte) []byte {
	return append([]byte(name+"\x00"), signed...)
}
