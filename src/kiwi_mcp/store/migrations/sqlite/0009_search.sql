-- What searches have worked out of texts, by the digest of each text: its stems with their impacts, and its vector, which
-- may come later. A cache: losing it costs time and nothing else. `used_on` counts days since 1970.

create table sheets (
  digest blob primary key,
  words blob not null,
  vector blob not null,
  used_on integer not null
);
create index idx_sheets_used on sheets (used_on);
