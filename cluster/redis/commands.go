package redis

import (
	"context"
	"errors"
	"fmt"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// Entry is an entry of a stream.
type Entry struct {
	ID    string
	Value []byte      // of the field that was asked for; nil: it has none
	Err   *ReplyError // not nil: the entry was not read
}

// AppendToStream appends an entry with one field, and removes the oldest ones beyond about maxLength.
func (c *Client) AppendToStream(ctx context.Context, key string, maxLength int64, field string, value []byte) error {
	args := &goredis.XAddArgs{Stream: key, MaxLen: maxLength, Approx: true, Values: []any{field, value}}
	_, err := do(ctx, c, c.options.readTimeout, func(ctx context.Context, l goredis.UniversalClient) (string, error) {
		return l.XAdd(ctx, args).Result()
	})
	return err
}

// ReadStream returns up to count entries after the one with an ID, and waits up to block for the first. areMore: there may be
// more. An entry that is beyond the bounds of a reply is returned with its Err; if several are read with it, the first of
// them is returned alone.
func (c *Client) ReadStream(
	ctx context.Context, key, after, field string, count int, block time.Duration,
) (entries []Entry, areMore bool, err error) {
	entries, err = c.readStream(ctx, key, after, field, count, block)
	refused := (*ReplyError)(nil)
	if !errors.As(err, &refused) {
		return entries, len(entries) == count, err
	}
	if count > 1 {
		entries, err = c.readStream(ctx, key, after, field, 1, block)
	}
	if errors.As(err, &refused) && len(refused.firstStrings) == 2 { // the key, and the ID of the first entry
		return []Entry{{ID: refused.firstStrings[1], Err: refused}}, true, nil
	}
	return entries, true, err
}

// errEarlyNull is the error for a reply of null that a server has sent at once.
var errEarlyNull = errors.New("a read that waits for messages ended at once without any: the server is not Redis, or, " +
	"in mode cluster, its nodes are announced without addresses (cluster-preferred-endpoint-type)")

func (c *Client) readStream(ctx context.Context, key, after, field string, count int, block time.Duration) ([]Entry, error) {
	args, began := &goredis.XReadArgs{Streams: []string{key, after}, Count: int64(count), Block: block}, time.Now()
	streams, err := do(ctx, c, block+c.options.readTimeout, func(ctx context.Context, l goredis.UniversalClient) ([]goredis.XStream, error) {
		return l.XRead(ctx, args).Result()
	})
	if err == goredis.Nil {
		if time.Since(began) < block/2 { // callers repeat this at once
			return nil, errEarlyNull
		}
		return nil, nil // none came in time
	}
	var entries []Entry
	for _, stream := range streams {
		for _, message := range stream.Messages {
			e := Entry{ID: message.ID}
			if value, ok := message.Values[field].(string); ok {
				e.Value = []byte(value)
			}
			entries = append(entries, e)
		}
	}
	return entries, err
}

// ReadValues returns the first maxBytes of the values of keys; empty if there is none.
func (c *Client) ReadValues(ctx context.Context, keys []string, maxBytes int64) (values [][]byte, err error) {
	commands, err := c.pipeline(ctx, func(ctx context.Context, p goredis.Pipeliner) {
		for _, key := range keys {
			p.GetRange(ctx, key, 0, maxBytes-1)
		}
	})
	for _, command := range commands {
		values = append(values, []byte(command.(*goredis.StringCmd).Val()))
	}
	return values, err
}

// WriteValue sets the value of a key for a time. With onlyNew it does not replace another one. It reports whether it has set it.
func (c *Client) WriteValue(
	ctx context.Context, key string, value []byte, lifetime time.Duration, onlyNew bool,
) (isWritten bool, err error) {
	args := goredis.SetArgs{TTL: lifetime}
	if onlyNew {
		args.Mode = "NX"
	}
	_, err = do(ctx, c, c.options.readTimeout, func(ctx context.Context, l goredis.UniversalClient) (string, error) {
		return l.SetArgs(ctx, key, value, args).Result()
	})
	if err == goredis.Nil {
		return false, nil
	}
	return err == nil, err
}

// DeleteValues deletes keys.
func (c *Client) DeleteValues(ctx context.Context, keys []string) error {
	_, err := c.pipeline(ctx, func(ctx context.Context, p goredis.Pipeliner) {
		for _, key := range keys {
			p.Unlink(ctx, key)
		}
	})
	return err
}

// ReadHash returns the fields of a hash. It fails if there are more than maxFields.
func (c *Client) ReadHash(ctx context.Context, key string, maxFields int64) (map[string]string, error) {
	n, err := do(ctx, c, c.options.readTimeout, func(ctx context.Context, l goredis.UniversalClient) (int64, error) {
		return l.HLen(ctx, key).Result()
	})
	if err != nil {
		return nil, err
	}
	if n > maxFields {
		return nil, fmt.Errorf("%s has %d fields, more than %d: something else writes to it", key, n, maxFields)
	}
	return do(ctx, c, c.options.readTimeout, func(ctx context.Context, l goredis.UniversalClient) (map[string]string, error) {
		return l.HGetAll(ctx, key).Result()
	})
}

// UpdateHash sets some fields of a hash, as names and values in turn, and deletes others.
func (c *Client) UpdateHash(ctx context.Context, key string, set []any, deleted []string) error {
	_, err := c.pipeline(ctx, func(ctx context.Context, p goredis.Pipeliner) {
		if len(set) > 0 {
			p.HSet(ctx, key, set...)
		}
		if len(deleted) > 0 {
			p.HDel(ctx, key, deleted...)
		}
	})
	return err
}

// pipeline sends at once the commands that add adds, and returns them with their replies.
func (c *Client) pipeline(ctx context.Context, add func(context.Context, goredis.Pipeliner)) ([]goredis.Cmder, error) {
	return do(ctx, c, c.options.readTimeout, func(ctx context.Context, l goredis.UniversalClient) ([]goredis.Cmder, error) {
		return l.Pipelined(ctx, func(p goredis.Pipeliner) error {
			add(ctx, p)
			return nil
		})
	})
}
